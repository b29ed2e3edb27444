"""onnxruntime as a device: an independent engine. The graphs are written here by hand from the weights alone."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from tests.comparisons.devices.engines import Tensors
from tests.comparisons.devices.models import shared


class Graph:
    """A graph that is built node by node; names of results are made up."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.outputs: list[str] = []

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        array = value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        name = name or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def output(self, value: str, name: str) -> str:
        self.outputs.append(name)
        return self.op("Identity", value, name=name)

    def scale(self, value: str, factor: float) -> str:
        return self.op("Mul", value, self.constant(np.float32(factor)))

    def linear(self, x: str, layer: Any) -> str:
        product = self.op("MatMul", x, self.constant(layer.weight.t()))
        return product if layer.bias is None else self.op("Add", product, self.constant(layer.bias))

    def layer_norm(self, x: str, norm: Any) -> str:
        gain, bias = self.constant(norm.weight), self.constant(norm.bias)
        return self.op("LayerNormalization", x, gain, bias, axis=-1, epsilon=norm.eps)

    def rms_norm(self, x: str, norm: Any) -> str:
        squares = self.op("ReduceMean", self.op("Mul", x, x), self.constant(np.array([-1])), keepdims=1)
        root = self.op("Sqrt", self.op("Add", squares, self.constant(np.float32(norm.variance_epsilon))))
        return self.op("Mul", self.op("Div", x, root), self.constant(norm.weight))

    def heads(self, x: str, shape: Sequence[int]) -> str:
        """[samples, tokens, width] -> [samples, heads, tokens, size]."""
        return self.op("Transpose", self.op("Reshape", x, self.constant(np.array(shape))), perm=[0, 2, 1, 3])

    def attend(self, q: str, k: str, v: str, tokens: int, scale: float, width: int) -> str:
        scores = self.scale(self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2])), scale)
        mask = np.triu(np.full((tokens, tokens), -1e30, np.float32), 1)
        weights = self.op("Softmax", self.op("Add", scores, self.constant(mask)), axis=-1)
        mixed = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.constant(np.array([0, 0, width])))

    def run(self, ids: Tensor) -> Tensors:
        given = helper.make_tensor_value_info("ids", TensorProto.INT64, list(ids.shape))
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["s", "t", "c"]) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "device", [given], results, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(self.outputs, {"ids": ids.numpy()})
        return dict(zip(self.outputs, map(torch.from_numpy, found), strict=True))


def through_onnxruntime(name: str, ids: Tensor) -> Tensors:
    return {"small": _small, "tiny-llama": _llama}[name](shared(name), ids)


def _small(model: Any, ids: Tensor) -> Tensors:
    graph, tokens = Graph(), ids.shape[1]
    x = graph.op("Gather", graph.constant(model.embedding.weight), "ids")
    graph.output(x, "embedding.output")
    width = model.embedding.weight.shape[1]
    for index, layer in enumerate(model.layers):
        size = width // layer.heads
        qkv = graph.linear(graph.layer_norm(x, layer.norm1), layer.qkv)
        parts = [
            graph.op("Slice", qkv, *(graph.constant(np.array([n])) for n in (i * width, (i + 1) * width, 2)))
            for i in range(3)
        ]
        q, k, v = (graph.heads(part, [0, 0, layer.heads, size]) for part in parts)
        x = graph.op("Add", x, graph.linear(graph.attend(q, k, v, tokens, layer.scale, width), layer.out))
        up = graph.linear(graph.layer_norm(x, layer.norm2), layer.up)
        x = graph.op("Add", x, graph.linear(graph.op("Gelu", up), layer.down))
        graph.output(x, f"layer_{index}.output")
    x = graph.output(graph.layer_norm(x, model.norm), "final_norm.output")
    graph.output(graph.linear(x, model.head), "logits")
    return graph.run(ids)


def _llama(model: Any, ids: Tensor) -> Tensors:
    graph, tokens, config = Graph(), ids.shape[1], model.config
    heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(0, size, 2) / size))
    turn = [graph.constant(np.tile(wave(angles), 2).astype(np.float32)) for wave in (np.cos, np.sin)]

    def rotated(x: str) -> str:
        ends = [graph.constant(np.array([n])) for n in (0, size // 2, size, 3)]
        left, right = graph.op("Slice", x, ends[0], ends[1], ends[3]), graph.op("Slice", x, ends[1], ends[2], ends[3])
        crossed = graph.op("Concat", graph.op("Neg", right), left, axis=3)
        return graph.op("Add", graph.op("Mul", x, turn[0]), graph.op("Mul", crossed, turn[1]))

    x = graph.output(graph.op("Gather", graph.constant(model.model.embed_tokens.weight), "ids"), "embedding.output")
    shared_heads = graph.constant(np.repeat(np.arange(keys), heads // keys))
    for index, layer in enumerate(model.model.layers):
        normed, attention = graph.rms_norm(x, layer.input_layernorm), layer.self_attn
        q = rotated(graph.heads(graph.linear(normed, attention.q_proj), [0, 0, heads, size]))
        k = rotated(graph.heads(graph.linear(normed, attention.k_proj), [0, 0, keys, size]))
        v = graph.heads(graph.linear(normed, attention.v_proj), [0, 0, keys, size])
        k, v = (graph.op("Gather", one, shared_heads, axis=1) for one in (k, v))
        mixed = graph.attend(q, k, v, tokens, 1 / math.sqrt(size), heads * size)
        x = graph.op("Add", x, graph.linear(mixed, attention.o_proj))
        normed = graph.rms_norm(x, layer.post_attention_layernorm)
        gate = graph.linear(normed, layer.mlp.gate_proj)
        opened = graph.op("Mul", gate, graph.op("Sigmoid", gate))
        product = graph.op("Mul", opened, graph.linear(normed, layer.mlp.up_proj))
        x = graph.output(graph.op("Add", x, graph.linear(product, layer.mlp.down_proj)), f"layer_{index}.output")
    x = graph.output(graph.rms_norm(x, model.model.norm), "final_norm.output")
    head: nn.Linear = model.lm_head
    graph.output(graph.linear(x, head), "logits")
    return graph.run(ids)
