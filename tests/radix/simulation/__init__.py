"""The simulator of `test_simulator.py`: a deployment, its directory, and runs that are reduced when they fail."""

from .directory import Directory as Directory
from .reduction import Failure as Failure
from .reduction import actions_of as actions_of
from .reduction import run as run
from .reduction import shortest as shortest
