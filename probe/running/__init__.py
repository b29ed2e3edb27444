"""One model under one recipe: capture, modes, calibration, the float reference, measurement, coverage."""
