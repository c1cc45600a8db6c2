"""Matrix products of rows that each choose one of several weight matrices, as the tokens of a mixture of experts do."""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.groups import Groups, group_rows, tile_rows

__all__ = ["Groups", "group_rows", "grouped_matmul", "tile_rows"]
