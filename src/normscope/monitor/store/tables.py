"""Tables of a run store."""

from normscope.database import OF_RUN, Database

FORMAT = 1
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ranks (
    rank INTEGER PRIMARY KEY, token TEXT NOT NULL, attempt INTEGER NOT NULL, rewinds INTEGER NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, started TEXT NOT NULL, began REAL NOT NULL, seen REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'ended', 'failed')), reason TEXT NOT NULL
);
CREATE TABLE layouts (
    id INTEGER PRIMARY KEY, rank INTEGER NOT NULL, name TEXT NOT NULL, columns TEXT NOT NULL,
    UNIQUE (rank, name, columns)
);
CREATE TABLE rows (
    rank INTEGER NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL,
    layout INTEGER NOT NULL REFERENCES layouts (id), time REAL NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (rank, name, step)
);
CREATE TABLE alarms (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, rank INTEGER NOT NULL, attempt INTEGER NOT NULL,
    time REAL NOT NULL, code TEXT NOT NULL, name TEXT NOT NULL, severity TEXT NOT NULL, sites TEXT NOT NULL,
    message TEXT NOT NULL, evidence TEXT NOT NULL, threshold TEXT NOT NULL, source TEXT NOT NULL,
    remedy TEXT NOT NULL, remedies TEXT NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, rank INTEGER NOT NULL, attempt INTEGER NOT NULL,
    time REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
);
"""
RUN = Database(
    application=OF_RUN,
    format=FORMAT,
    tables=TABLES,
    ours="a run store that normscope.Monitor wrote",
    another="name another file",
    create="name the file that the Monitor of the run was given as store",
    unwritable="name another file",
    again="try again; what was written before is safe",
    synchronous="NORMAL",
    patience_seconds=10.0,
)
OF_RANK = ("rows", "alarms", "events")
"""Tables of what a rank has written."""
