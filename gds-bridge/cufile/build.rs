//! Sets the soname that programs ask for. The library's threads never end, so the library must stay
//! loaded when a program closes it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
