"""Maps: grids of training runs that show which of them train.

The main calls:

    grid = Grid(base=RunConfig(model="nn:decoder,width=32", validation=0.0), schemes=["post", "pre"],
                depths=[4, 8], lrs=[1e-4, 1e-3])
    with Store(Path("map.sqlite")) as store:
        run_map(store, grid.cells)
"""

from normscope.maps.cell import Cell, Result
from normscope.maps.grid import Grid
from normscope.maps.owner import Owner, Process
from normscope.maps.record import Counts, Crew, Record
from normscope.maps.run import run_map
from normscope.maps.store import Store
from normscope.maps.training import train_group

__all__ = [
    "Cell",
    "Counts",
    "Crew",
    "Grid",
    "Owner",
    "Process",
    "Record",
    "Result",
    "Store",
    "run_map",
    "train_group",
]
