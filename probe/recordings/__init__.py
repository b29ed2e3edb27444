"""Recordings: what a model gave on one device, kept so that it can be judged on any other machine.

<folder>/manifest.json                   what really ran (manifest.py)
<folder>/tokens.safetensors              the tokens that the model was given
<folder>/mode_2_1-fp8_e4m3.safetensors   one recipe: layer_0.output, layer_0.input if it was asked for, logits

That is the layout `safetensors`; npy, npz and pt are those of the users' own scripts (script_formats.py). A tensor is
[samples, tokens, ...] in the dtype that the model gave. Files from elsewhere are checked before they are used, and
never unpickled; whatever is wrong with them is a RecordingError.
"""

from probe.recordings.manifest import RecordingError
from probe.recordings.reading import Recording, read_recording
from probe.recordings.recorder import record, write_recording
from probe.recordings.request import RecordRequest

__all__ = ["RecordRequest", "Recording", "RecordingError", "read_recording", "record", "write_recording"]
