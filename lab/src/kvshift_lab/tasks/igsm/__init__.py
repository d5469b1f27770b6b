"""Grade-school mathematics problems with solutions (iGSM): two generators, a checker of solutions, and the task."""

from kvshift_lab.tasks.igsm.task import IGSMConfig, IGSMTask  # noqa: F401
