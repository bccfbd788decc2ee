"""How ranks meet: the group of one, and Horovod's allreduce."""

from mxdist.runtime.parallel.allreduce import AllReduce, join
from mxdist.runtime.parallel.base import Alone, Group, digest_arrays

__all__ = ["AllReduce", "Alone", "Group", "digest_arrays", "join"]
