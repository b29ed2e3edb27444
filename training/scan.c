/* The gated selective scan of a Mamba-1 block and its gradient, for training on one CPU thread.
 *
 *     delta = softplus(dt)                         (identity above 20)
 *     h[t]  = exp(delta[t] A) h[t-1] + delta[t] u[t] B[t]
 *     s[t]  = <h[t], C[t]> + D u[t]
 *     y[t]  = s[t] silu(z[t])
 *
 * Channel-major: u, dt, z, y are (channels, batch, time); A is (channels, N); B and C are (batch, time, N).
 * One (channel, batch) row at a time, so that the states of a whole row stay in the nearest caches. The
 * forward pass keeps no states: the gradient computes them again. scan.py compiles this file for autograd.
 */
#include <math.h>

#define N 16          /* state size: two AVX registers */
#define MAX_TIME 1024 /* longest row; scan.py checks both */

typedef float State[N];

/* exp in operations the compiler can vectorize: 2^k by exponent bits, the rest by Taylor's series. */
static inline float fast_exp(float x)
{
    x = fminf(fmaxf(x * 1.44269504f, -126.f), 126.f);
    float k = rintf(x), f = (x - k) * 0.693147181f;
    union { int bits; float value; } power = {((int)k + 127) << 23};
    return power.value *
           (1.f + f * (1.f + f * (1.f / 2 + f * (1.f / 6 + f * (1.f / 24 + f * (1.f / 120 + f / 720))))));
}

static float softplus(float x) { return x > 20.f ? x : logf(1.f + fast_exp(x)); }
static float sigmoid(float x) { return 1.f / (1.f + fast_exp(-x)); }

/* States after, and decays before, every step of one row. */
static void row_states(const float *u, const float *delta, const State A, const State *B, State *h,
                       State *decay, int time)
{
    State now = {0};
    for (int t = 0; t < time; t++) {
        float input = delta[t] * u[t];
#pragma GCC ivdep
        for (int n = 0; n < N; n++) {
            decay[t][n] = fast_exp(delta[t] * A[n]);
            h[t][n] = now[n] = decay[t][n] * now[n] + input * B[t][n];
        }
    }
}

void scan_forward(const float *u, const float *dt, const State *A, const State *B, const State *C,
                  const float *D, const float *z, float *y, int channels, int batch, int time)
{
    static State h[MAX_TIME], decay[MAX_TIME];
    static float delta[MAX_TIME];
    for (int c = 0; c < channels; c++)
        for (int b = 0; b < batch; b++) {
            long row = ((long)c * batch + b) * time;
            const State *Cb = C + (long)b * time;
            for (int t = 0; t < time; t++) delta[t] = softplus(dt[row + t]);
            row_states(u + row, delta, A[c], B + (long)b * time, h, decay, time);
            for (int t = 0; t < time; t++) {
                float s = D[c] * u[row + t];
                for (int n = 0; n < N; n++) s += h[t][n] * Cb[t][n];
                y[row + t] = s * z[row + t] * sigmoid(z[row + t]);
            }
        }
}

/* Gradients of all seven inputs from dy. dA, dB, dC, dD are added to: pass zeros. */
void scan_backward(const float *u, const float *dt, const State *A, const State *B, const State *C,
                   const float *D, const float *z, const float *dy, float *du, float *ddt, State *dA,
                   State *dB, State *dC, float *dD, float *dz, int channels, int batch, int time)
{
    static State h[MAX_TIME], decay[MAX_TIME];
    static float delta[MAX_TIME];
    static const State zero;
    for (int c = 0; c < channels; c++)
        for (int b = 0; b < batch; b++) {
            long row = ((long)c * batch + b) * time, step = (long)b * time;
            for (int t = 0; t < time; t++) delta[t] = softplus(dt[row + t]);
            row_states(u + row, delta, A[c], B + step, h, decay, time);
            State dA_row = {0};
            State carry = {0}; /* d loss / d h[t], as far as it comes from later steps */
            for (int t = time - 1; t >= 0; t--) {
                const float *Bt = B[step + t], *Ct = C[step + t], *before = t ? h[t - 1] : zero;
                float ut = u[row + t], gate = sigmoid(z[row + t]), silu = z[row + t] * gate;
                float ds = dy[row + t] * silu, s = D[c] * ut, through_B = 0, through_A = 0;
#pragma GCC ivdep
                for (int n = 0; n < N; n++) {
                    float dh = carry[n] + ds * Ct[n];
                    carry[n] = dh * decay[t][n];
                    float ddecay = carry[n] * before[n];
                    s += h[t][n] * Ct[n];
                    through_B += dh * Bt[n];
                    through_A += ddecay * A[c][n];
                    dA_row[n] += ddecay * delta[t];
                    dB[step + t][n] += dh * delta[t] * ut;
                    dC[step + t][n] += ds * h[t][n];
                }
                du[row + t] = ds * D[c] + through_B * delta[t];
                ddt[row + t] = (through_B * ut + through_A) * sigmoid(dt[row + t]);
                dD[c] += ds * ut;
                dz[row + t] = dy[row + t] * s * (gate + silu * (1.f - gate));
            }
            for (int n = 0; n < N; n++) dA[c][n] += dA_row[n];
        }
}
