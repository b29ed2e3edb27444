"""Mutations of valid files by a seeded random generator: of bytes, JSON trees, headers and tensors."""

import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.5, 1e-320, 1e308, float("inf")),
    *("", " ", "None", "\x00", "\x1b[2J", "\ud800", "../../etc/passwd", "/dev/zero", "a" * 10_000, "9" * 5_000, "<b>"),
    *("fp32", "mode_2_1", "layer_0", "os:getpid", "\u202e", "%s%n", "NaN", "[" * 50, "(a+)+$", "*", ".", "~", "-"),
    *([], {}, [[]], [None], {"": None}, [1] * 1000, {"a": {"b": {"c": []}}}),
)


def _deep(rng: random.Random) -> Any:
    value: Any = rng.choice(NASTY)
    for _ in range(rng.choice((3, 60, 900))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def nasty(rng: random.Random) -> Any:
    return _deep(rng) if rng.random() < 0.05 else rng.choice(NASTY)


def mutate_tree(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one place replaced, removed, doubled or renamed."""
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(value)
    if not places:
        return nasty(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        node, key = rng.choice(places)
        if isinstance(node, list) and not (isinstance(key, int) and key < len(node)):
            continue
        if isinstance(node, dict) and key not in node:
            continue
        action = rng.randrange(4)
        if action == 0:
            del node[key]
        elif action == 1 and isinstance(node, dict):
            node[str(nasty(rng))[:60]] = node.pop(key)
        elif action == 2 and isinstance(node, list):
            node.insert(0, node[key])
        else:
            node[key] = nasty(rng)
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, doubled, filled, or with a number replaced."""
    place = rng.randrange(len(data) + 1)
    end = min(len(data), place + rng.choice((1, 4, 64, 1000)))
    action = rng.randrange(9)
    if action == 0:
        return data[:place]
    if action == 1:
        return data[:place] + rng.randbytes(end - place) + data[end:]
    if action == 2:
        return data[:place] + data[end:]
    if action == 3:
        return data[:end] + data[place:]
    if action == 4:
        return data[:place] + bytes(end - place) + data[end:]
    if action == 5:
        return data[:place] + rng.choice((b"\xff\xfe", b"\x00", b"\r", b"{{{", b"[" * 5000, b"9" * 6000)) + data[place:]
    if action == 6:
        return rng.choice((b"", b"\x00", b"null", b"[]", b"{}", b"PK\x03\x04", b"\x80\x02.", rng.randbytes(200)))
    head = data[: min(len(data), 4000)]
    digits = [i for i, byte in enumerate(head) if 48 <= byte < 58]
    if not digits:
        return data[:place]
    at = rng.choice(digits)
    new = rng.choice((b"0", b"-1", b"9", b"99999999999999999999", b"1e999", b"nan", b"x"))
    return data[:at] + new + data[at + 1 :]


def _json(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(mutate_tree(json.loads(data), rng)).encode("utf-8", "surrogatepass")


def _jsonl(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    lines[rng.randrange(len(lines))] = json.dumps(rng.choice((nasty(rng), {"text": nasty(rng)}))).encode()
    return b"\n".join(lines)


def _yaml(data: bytes, rng: random.Random) -> bytes:
    import yaml

    text: str = yaml.safe_dump(mutate_tree(yaml.safe_load(data), rng))
    return text.encode("utf-8", "backslashreplace")


def _toml(data: bytes, rng: random.Random) -> bytes:
    value = rng.choice(('"x"', "5", "[]", "[[]]", "{}", "1979-05-27", "nan", "inf", '["", 1]', "true", '["[", "*"]'))
    return rng.choice((data.replace(b'"linear_wa"', value.encode()), data + b"\nx = " + value.encode()))


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_tree(json.loads(data[8 : 8 + size]), rng)).encode("utf-8", "backslashreplace")
    return rng.choice((len(header), size, 2**63, 0)).to_bytes(8, "little") + header + data[8 + size :]


def _tensor(rng: random.Random) -> Any:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(rng.randrange(100)))
    many = 1 << rng.choice((10, 20, 30))
    made: list[Callable[[], Any]] = [
        lambda: x[0], lambda: x[0, 0, 0], lambda: x[:0], lambda: x.long(), lambda: x.bool(),
        lambda: x.to(torch.complex64),
        lambda: x.to_sparse(), lambda: x.to("meta"), lambda: x.to(torch.float8_e4m3fn), lambda: x.half(),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), lambda: x.as_strided((many,), (0,)),
        lambda: x.as_strided((4, 1 << 33), (0, 0)), lambda: x.expand(5, 2, 6, 8), lambda: x.transpose(0, 2),
        lambda: x * float("nan"), lambda: x / 0, lambda: x * 0, lambda: x * 1e38, lambda: x.double() * 1e300,
        lambda: {"a": x, "b": None}, lambda: {1: x}, lambda: [x, x], lambda: None, lambda: "text", lambda: {},
        lambda: {"input_ids": x}, lambda: {"input_ids": [[1, 2], [3]]}, lambda: {"input_ids": -x.long()},
        lambda: {"input_ids": torch.zeros(1, dtype=torch.int64).as_strided((many, many), (0, 0))},
        lambda: torch.nn.Parameter(x), lambda: x.requires_grad_(), lambda: torch.zeros(0, 3, 4), lambda: x.conj(),
        lambda: torch.full((2, 6, 8), 1e-45), lambda: torch.ones((1,) * 40), lambda: torch.nested.nested_tensor([x, x]),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of kinds of tensors that it is about to drop
        return rng.choice(made)()


def _pt(data: bytes, rng: random.Random) -> bytes:
    stream = io.BytesIO()
    torch.save(_tensor(rng), stream)
    return stream.getvalue()


def _array(rng: random.Random) -> "np.ndarray[Any, Any]":
    kinds = ("<f4", ">f4", "<f2", "<f8", "<i8", "?", "<c8", "S3", "<U2", "M8[s]", "<g", "V4")
    shape = rng.choice(((4, 32), (2, 6, 8), (0,), (), (1,) * 30, (3, 0, 2)))
    return np.zeros(shape, dtype=rng.choice(kinds))


def _npy(data: bytes, rng: random.Random) -> bytes:
    stream = io.BytesIO()
    np.save(stream, _array(rng))
    return stream.getvalue()


def _npz(data: bytes, rng: random.Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = old.read(name)
            if rng.random() < 0.5:
                content = rng.choice((_npy, mutate_bytes))(content, rng)
            new.writestr(rng.choice((name, name, "x", "../x.npy", "mode_fp32_output.npy")), content)
    return stream.getvalue()


#: By the name of a file, what changes its content but not its form.
BY_KIND: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": _json, ".jsonl": _jsonl, ".yaml": _yaml, ".toml": _toml, ".safetensors": _safetensors, ".pt": _pt,
    ".npy": _npy, ".npz": _npz,
}  # fmt: skip


def mutate_file(file: Path, rng: random.Random) -> None:
    """Change a file; sometimes it is missing, a folder or a link."""
    data = file.read_bytes()
    if rng.random() < 0.04:
        file.unlink()
        if rng.random() < 0.5:
            file.mkdir()
        elif rng.random() < 0.5:
            file.symlink_to(rng.choice(("/dev/zero", "/nowhere", file.name, "/etc/passwd")))
        return
    formed = BY_KIND.get(file.suffix)
    changed = formed(data, rng) if formed and rng.random() < 0.6 else mutate_bytes(data, rng)
    file.write_bytes(changed)
