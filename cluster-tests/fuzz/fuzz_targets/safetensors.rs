#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| strake_fuzz_targets::safetensors::run(data));
