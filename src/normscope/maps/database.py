"""Tables of a map's store."""

from normscope.database import OF_MAP, Database

FORMAT = 1

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE owners (
    id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT NOT NULL,
    keeper_pid INTEGER NOT NULL, keeper_started TEXT NOT NULL,
    heartbeat REAL NOT NULL, step INTEGER NOT NULL
);
CREATE TABLE cells (
    key TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, crew INTEGER NOT NULL, config TEXT NOT NULL,
    weight REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'claimed', 'done', 'crashed')),
    owner TEXT REFERENCES owners (id), crashes INTEGER NOT NULL DEFAULT 0, reason TEXT,
    CHECK ((state = 'claimed') = (owner IS NOT NULL))
);
CREATE INDEX cells_by_state ON cells (state, crew);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL REFERENCES cells (key), owner TEXT NOT NULL,
    began REAL NOT NULL, ended REAL, outcome TEXT
);
CREATE TABLE results (
    key TEXT PRIMARY KEY REFERENCES cells (key), verdict TEXT NOT NULL, losses BLOB NOT NULL,
    unigram_entropy REAL NOT NULL, certain_at INTEGER, certain TEXT, stopped INTEGER NOT NULL,
    seconds REAL NOT NULL, stack INTEGER NOT NULL, versions TEXT NOT NULL, finished REAL NOT NULL
);
"""

MAP = Database(
    application=OF_MAP,
    format=FORMAT,
    tables=TABLES,
    ours="a store that normscope map wrote",
    another="name another --store",
    create="name one, or create it with --schemes, --depths and --lrs",
    unwritable="copy it, or leave the grid out to show the results in it",
    again="run the same command again; finished cells are safe",
)
