"""Recordings: what a model gave on one device, kept so that it can be judged on any other machine.

<folder>/manifest.json                   what really ran (format.py)
<folder>/tokens.safetensors              what the model was given
<folder>/mode_2_1-fp8_e4m3.safetensors   one recipe: layer_0.output, layer_0.input if it was asked for, logits

That is the layout `safetensors`; npy, npz and pt are those of the users' own scripts (spelling.py). A tensor is
[samples, tokens, ...], all samples in a row, in the dtype that the model gave. Files from elsewhere are checked before
anything is believed, and never unpickled; whatever is wrong with them is a RecordingError.
"""

from probe.recordings.checked import RecordingError
from probe.recordings.format import Manifest, Recorded, Tokens
from probe.recordings.reading import Recording, read_recording
from probe.recordings.writing import write_recording

__all__ = ["Manifest", "Recorded", "Recording", "RecordingError", "Tokens"]
__all__ += ["read_recording", "write_recording"]
