//! Element types, by their names in safetensors, DLPack and the array interface.

use strake_gds::tensors::Dtype;

/// One type: see [`ALL`].
type Row = (&'static str, Dtype, Option<(u8, u8)>, Option<&'static str>);

/// Name, type, DLPack's code and bits, and the array interface's text, if they have one. Eight-bit
/// floats are exported as bytes: DLPack's codes for them are too new to be understood everywhere.
const ALL: [Row; 22] = [
    ("BOOL", Dtype::BOOL, Some((6, 8)), Some("|b1")),
    ("F4", Dtype::F4, None, None),
    ("F6_E2M3", Dtype::F6_E2M3, None, None),
    ("F6_E3M2", Dtype::F6_E3M2, None, None),
    ("U8", Dtype::U8, Some((1, 8)), Some("|u1")),
    ("I8", Dtype::I8, Some((0, 8)), Some("|i1")),
    ("F8_E5M2", Dtype::F8_E5M2, Some((1, 8)), Some("|u1")),
    ("F8_E4M3", Dtype::F8_E4M3, Some((1, 8)), Some("|u1")),
    ("F8_E8M0", Dtype::F8_E8M0, Some((1, 8)), Some("|u1")),
    ("F8_E4M3FNUZ", Dtype::F8_E4M3FNUZ, Some((1, 8)), Some("|u1")),
    ("F8_E5M2FNUZ", Dtype::F8_E5M2FNUZ, Some((1, 8)), Some("|u1")),
    ("I16", Dtype::I16, Some((0, 16)), Some("<i2")),
    ("U16", Dtype::U16, Some((1, 16)), Some("<u2")),
    ("F16", Dtype::F16, Some((2, 16)), Some("<f2")),
    ("BF16", Dtype::BF16, Some((4, 16)), None),
    ("I32", Dtype::I32, Some((0, 32)), Some("<i4")),
    ("U32", Dtype::U32, Some((1, 32)), Some("<u4")),
    ("F32", Dtype::F32, Some((2, 32)), Some("<f4")),
    ("C64", Dtype::C64, Some((5, 64)), Some("<c8")),
    ("F64", Dtype::F64, Some((2, 64)), Some("<f8")),
    ("I64", Dtype::I64, Some((0, 64)), Some("<i8")),
    ("U64", Dtype::U64, Some((1, 64)), Some("<u8")),
];

pub fn by_name(name: &str) -> Option<Dtype> {
    ALL.iter().find(|(n, ..)| *n == name).map(|a| a.1)
}

pub fn name(d: Dtype) -> &'static str {
    ALL.iter().find(|a| a.1 == d).map_or("?", |a| a.0)
}

pub fn dlpack(d: Dtype) -> Option<(u8, u8)> {
    ALL.iter().find(|a| a.1 == d).and_then(|a| a.2)
}

/// The first type with this code: eight-bit integers count as U8, not as a float type.
pub fn by_dlpack(code: u8, bits: u8) -> Option<Dtype> {
    ALL.iter().find(|a| a.2 == Some((code, bits))).map(|a| a.1)
}

pub fn typestr(d: Dtype) -> Option<&'static str> {
    ALL.iter().find(|a| a.1 == d).and_then(|a| a.3)
}

pub fn by_typestr(s: &str) -> Option<Dtype> {
    let plain = s.replace('=', "<");
    ALL.iter().find(|a| a.3 == Some(&plain)).map(|a| a.1)
}
