"""Engines: where the units of a job run, on this machine or on a Ray cluster.

    interface  a job, its units, and what every engine promises; `identity` distinguishes them
    process    what every worker process has; `versions`, what it must have in common with this one
    local      in this process, or in worker processes on this machine
    cluster    on the nodes of a Ray cluster: the `connection` to it, which `nodes` are fit, the `pool` of workers, how
               units are handed out (`dispatch`), and what runs there (`actor`)
    journal    finished units on disk, so that an interrupted run continues from there

The tools make a job and its units and merge the results; none of them knows which engine runs them.
"""

from probe.engines.interface import Engine, Job, Kept, Unit, UnitFailedError

__all__ = ["Engine", "Job", "Kept", "Unit", "UnitFailedError"]
