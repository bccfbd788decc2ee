"""Datasets: staged from a source into immutable versions, fetched and verified on nodes, pruned with care."""

from mxdist.data.fetch import fetch
from mxdist.data.manifest import File, Manifest, load_manifest
from mxdist.data.prune import Pruned, prune
from mxdist.data.split import load_split
from mxdist.data.stage import Staged, stage

__all__ = ["File", "Manifest", "Pruned", "Staged", "fetch", "load_manifest", "load_split", "prune", "stage"]
