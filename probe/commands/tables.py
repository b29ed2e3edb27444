"""Rows as aligned columns."""

import math

from probe.words import columns


def table(rows: list[dict[str, object]]) -> str:
    """Aligned columns: numbers to the right, words to the left."""
    texts = [{key: _cell(value) for key, value in row.items()} for row in rows]
    words = {key for key in rows[0] if any(isinstance(row[key], str) for row in rows)}
    return "\n".join(columns(texts, left=words))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0 or math.isinf(value):
            return f"{value:g}"
        if math.log2(abs(value)).is_integer() and abs(value) < 0.01:
            return f"2^{int(math.log2(abs(value)))}"
        return f"{value:.6g}"
    return str(value)
