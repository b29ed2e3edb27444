"""Recordings: layer inputs and outputs of a model on one device, stored for comparison on any machine.

<folder>/manifest.json                   what ran (manifest.py)
<folder>/tokens.safetensors              the tokens of the input
<folder>/mode_2_1-fp8_e4m3.safetensors   one recipe: layer_0.output, and layer_0.input and logits on request

This is the layout `safetensors`; npy, npz and pt are those of the users' own scripts (script_formats.py). A tensor is
[samples, tokens, ...] in the dtype of the model. Files from elsewhere are checked before they are used, and never
unpickled; whatever is wrong with them is a RecordingError.
"""

from probe.recordings.manifest import RecordingError
from probe.recordings.reading import Recording, read_recording
from probe.recordings.recorder import record
from probe.recordings.request import RecordRequest
from probe.recordings.stream import write_recording

__all__ = ["RecordRequest", "Recording", "RecordingError", "read_recording", "record", "write_recording"]
