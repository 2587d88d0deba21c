//! Tests of the chunk store as a whole.
