"""What came out: the journal, the tables, the HDF5 file and its reader.

The journal is the truth and is written line by line; the tables are built beside it from the same
records and replace ``results.h5`` as a whole. Only one rank writes.
"""
