//! Gives the library the name by which programs ask for it. Its threads stay, so it stays, too,
//! when a program closes it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
