//! Frames over TCP.
