"""Names that a module of claims is written with, so that one line imports them."""

from normscope.claims.claim import claim as claim
from normscope.claims.evidence import Case as Case
from normscope.claims.evidence import Evidence as Evidence
from normscope.claims.evidence import Figure as Figure
from normscope.claims.evidence import effect as effect
from normscope.claims.plots import Line as Line
from normscope.claims.plots import Plot as Plot
from normscope.claims.plots import lines_along as lines_along
from normscope.claims.plots import lines_at as lines_at
from normscope.claims.plots import lines_by as lines_by
from normscope.claims.sentences import plots as plots
from normscope.claims.setup import Setup as Setup
from normscope.claims.setup import flat as flat
from normscope.claims.setup import mapped as mapped
