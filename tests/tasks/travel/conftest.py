"""Tests that read tables in many small chunks share a database: making one takes longer than reading a few rows."""

import pytest


@pytest.fixture(scope="module")
def _database():
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        yield connection


@pytest.fixture
def one_database(_database, monkeypatch):
    """Not for tests that fork: the threads of a database do not live in a child."""

    def connect(config):
        connection = _database.cursor()
        for name, value in config.items():
            connection.execute(f"SET {name} = '{value}'")
        return connection

    monkeypatch.setattr("duckdb.connect", connect)
