"""The gate: from settings to a verdict for every case.

configuration   [tool.probe], checked                     session       one run of pytest, without pytest
cases           mode x layer x device x format            bench         model, reference, calibration of a run
observations    what a recipe gave: figures and values    golden        few values that stand for all
coverage        flaws: not applied, not on its grid       tolerances    how far a figure may move, as a table
verdicts        observation + baseline -> outcome         outcomes      what is told and reported
engine          measures recipes, judges, collects        sharing       one computation for many processes
"""
