"""The exercises: what a learner calls, the registry, the record, and each exercise's check in `phase_NN.py`.

front       check("2.3", answer), hint("2.3"), progress()
registry    what each exercise is called, how long it takes, its hints, the function that checks it
record      what the learner has tried and solved
"""

from flashlab.exercises.front import Passed, check, hint, progress
from flashlab.exercises.registry import Exercise, exercise, exercises, find

__all__ = ["Exercise", "Passed", "check", "exercise", "exercises", "find", "hint", "progress"]
