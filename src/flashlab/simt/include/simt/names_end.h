// From here on they are the reader's again: see names.h.
SIMT_NAMES(SIMT_POP)
