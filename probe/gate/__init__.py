"""The gate: from settings to a verdict for every case.

configuration   [tool.probe], checked                     session         one run of pytest, without pytest
cases           mode x layer x device x format, outcomes  bench           model, reference, calibration, baselines
observations    figures and values of a recipe            golden_values   few values that stand for all
tolerances      how far a figure may move, as a table     verdicts        observation + baseline -> outcome
engine          measures recipes, judges every case       baselines/      what was measured before, on disk
"""
