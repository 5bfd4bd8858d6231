"""Packs: one file that carries records and artifacts to another machine; read in place, written, installed."""
