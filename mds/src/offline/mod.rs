//! Work on the folders of metadata servers that do not run.
