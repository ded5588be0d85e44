"""Promises of speed: the CPU time of the quickest of some tries, because a busy machine slows down some."""

import time


def quickest(fn, tries=3):
    """Returns the seconds of this thread that the quickest of some calls takes."""
    taken = []
    for _ in range(tries):
        start = time.thread_time()
        fn()
        taken.append(time.thread_time() - start)
    return min(taken)


def check_takes_less(limit, fn, tries=5):
    """Checks that one of a few calls takes less than `limit` seconds of this thread; returns what it returned."""
    taken = []
    for _ in range(tries):
        start = time.thread_time()
        result = fn()
        taken.append(time.thread_time() - start)
        if taken[-1] < limit:
            return result
    raise AssertionError(f'{tries} calls took {min(taken):.2f} s and more, where {limit:.2f} were promised')
