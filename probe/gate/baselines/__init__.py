"""Baselines: what was measured before, by model, device and mode.

format    what is stored of a case, and the JSON file of a mode
store     the folder of files: reads, writes, and lists what changed
convert   the command that converts the files of an older probe
"""
