//! Gives the library the name by which the loader is to find it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libstrakegds.so.1");
}
