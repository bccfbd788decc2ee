"""The run store: one prefix per job, on a shared folder or on S3, behind one small interface."""

from mxdist.store.base import Entry, Store
from mxdist.store.opening import Credentials, open_store
from mxdist.store.run import Attempt, CancelIntent, Cause, Claim, JobRun, Result, State
from mxdist.store.sequence import Chunks, Lease, Register, Versioned

__all__ = [
    "Attempt",
    "CancelIntent",
    "Cause",
    "Chunks",
    "Claim",
    "Credentials",
    "Entry",
    "JobRun",
    "Lease",
    "Register",
    "Result",
    "State",
    "Store",
    "Versioned",
    "open_store",
]
