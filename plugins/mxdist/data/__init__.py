"""Datasets: staged from a source into immutable versions, fetched and verified on nodes, pruned with care.

Each module holds one verb and is called like it: ``from mxdist.data.stage import stage``.
"""
