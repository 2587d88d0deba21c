//! The format of sha256sum(1): a line for each file, `HASH  NAME` or `HASH *NAME`, with a backslash
//! in front if the name contains bytes that are written as `\\`, `\n` and `\r`.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
};

use strake_proto::seal::{DIGEST, Digest};

#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// Line number, from 1.
    pub number: usize,
    pub sum: Digest,
    pub name: OsString,
}

/// The lines that name a file, and the numbers of invalid lines. Empty lines and those that begin
/// with `#` are neither.
pub fn parse(text: &[u8]) -> (Vec<Line>, Vec<usize>) {
    let (mut lines, mut bad) = (Vec::new(), Vec::new());
    for (i, line) in text.split(|b| *b == b'\n').enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() || line[0] == b'#' {
            continue;
        }
        match one(line) {
            Some((sum, name)) => lines.push(Line { number: i + 1, sum, name }),
            None => bad.push(i + 1),
        }
    }
    (lines, bad)
}

fn one(line: &[u8]) -> Option<(Digest, OsString)> {
    let (escaped, line) = line.strip_prefix(b"\\").map_or((false, line), |rest| (true, rest));
    let (digits, rest) = line.split_at_checked(2 * DIGEST)?;
    let name = rest.strip_prefix(b"  ").or_else(|| rest.strip_prefix(b" *"))?;
    let name = if escaped { unescape(name)? } else { name.to_vec() };
    if name.is_empty() || name.contains(&0) {
        return None;
    }
    let mut sum = Digest::default();
    for (byte, pair) in sum.iter_mut().zip(digits.chunks(2)) {
        let digit = |d: u8| char::from(d).to_digit(16);
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    Some((sum, OsString::from_vec(name)))
}

fn unescape(name: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(name.len());
    let mut bytes = name.iter();
    while let Some(b) = bytes.next() {
        out.push(match b {
            b'\\' => match bytes.next()? {
                b'\\' => b'\\',
                b'n' => b'\n',
                b'r' => b'\r',
                _ => return None,
            },
            b => *b,
        });
    }
    Some(out)
}

/// The line of a file, with its line feed.
pub fn line(sum: &[u8], name: &OsStr) -> Vec<u8> {
    let escape = |b: &u8| match b {
        b'\\' => b"\\\\".to_vec(),
        b'\n' => b"\\n".to_vec(),
        b'\r' => b"\\r".to_vec(),
        b => vec![*b],
    };
    let escaped: Vec<u8> = name.as_bytes().iter().flat_map(escape).collect();
    let mark: &[u8] = if escaped == name.as_bytes() { b"" } else { b"\\" };
    [mark, hex::encode(sum).as_bytes(), b"  ", &escaped, b"\n"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn lines_of_sha256sum() {
        let text = format!(
            "# made by hand\n{ABC}  a\n\n{ABC} *b c\r\n\\{ABC}  x\\ny\\\\z\\r\n{}  ./ d",
            ABC.to_uppercase()
        );
        let (lines, bad) = parse(text.as_bytes());
        let names: Vec<_> = lines.iter().map(|l| (l.number, l.name.to_str().unwrap())).collect();
        assert_eq!(names, [(2, "a"), (4, "b c"), (5, "x\ny\\z\r"), (6, "./ d")]);
        assert!(lines.iter().all(|l| hex::encode(l.sum) == ABC) && bad.is_empty());
    }

    #[test]
    fn other_lines_are_counted() {
        let short = &ABC[1..];
        let text = format!(
            "{short}  a\n{ABC} a\n{ABC}\n{ABC}  \n{ABC}\t\ta\n\\{ABC}  a\\x\n\\{ABC}  a\\\ng{short}  a\n{ABC}  a\0b\n\u{fffd}\n{ABC}  good\n"
        );
        let (lines, bad) = parse(text.as_bytes());
        assert_eq!((lines.len(), bad), (1, (1..=10).collect()));
    }

    #[test]
    fn what_is_printed_is_read_again() {
        let sum: Digest = Digest::try_from(&[0xa5; DIGEST][..]).unwrap();
        for name in ["a", " a ", "a\\b", "\n", "a\r", "*", "\u{e4}"] {
            let text = line(&sum, OsStr::new(name));
            assert_eq!(text[0] == b'\\', name.contains(['\\', '\n', '\r']), "{name:?}");
            let (lines, bad) = parse(&text);
            assert_eq!(
                (lines, bad),
                (vec![Line { number: 1, sum, name: name.into() }], vec![]),
                "{name:?}"
            );
        }
    }
}
