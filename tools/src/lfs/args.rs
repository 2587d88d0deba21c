//! Command lines as getopt_long(3) reads them: short clusters (`-rv`), values attached or following
//! (`-c4`, `-c 4`), long options with `=` or a following value, unambiguous prefixes of long
//! options, `--`, options after operands.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
};

use super::Failure;

/// Whether an option takes a value. An optional one must be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    Value,
    Optional,
}

/// One option. Several names may share an `id`.
#[derive(Clone, Copy, Debug)]
pub struct Opt {
    pub id: &'static str,
    /// `'\0'`: none.
    pub short: char,
    /// Empty: none.
    pub long: &'static str,
    pub takes: Takes,
    /// False: Lustre has this option and StrakeFS has not, and using it is an error that says so.
    pub supported: bool,
}

pub const fn opt(short: char, long: &'static str, takes: Takes) -> Opt {
    Opt { id: long, short, long, takes, supported: true }
}

/// Another name of the option `id`.
pub const fn alias(id: &'static str, short: char, long: &'static str, takes: Takes) -> Opt {
    Opt { id, short, long, takes, supported: true }
}

/// An option of Lustre that StrakeFS lacks.
pub const fn lacking(short: char, long: &'static str, takes: Takes) -> Opt {
    Opt { id: long, short, long, takes, supported: false }
}

/// The given options and operands, in order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    pub options: Vec<(&'static str, Option<OsString>)>,
    pub operands: Vec<OsString>,
}

impl Parsed {
    pub fn has(&self, id: &str) -> bool {
        self.options.iter().any(|(i, _)| *i == id)
    }
    /// The last value given for an option.
    pub fn value(&self, id: &str) -> Option<&OsStr> {
        self.options.iter().rev().find(|(i, _)| *i == id).and_then(|(_, v)| v.as_deref())
    }
    pub fn text(&self, id: &str) -> Option<String> {
        self.value(id).map(|v| v.to_string_lossy().into_owned())
    }
}

struct Reader<'a> {
    command: &'a str,
    known: &'a [Opt],
    rest: std::vec::IntoIter<OsString>,
    out: Parsed,
}

/// Reads the arguments of `command`.
pub fn parse(command: &str, known: &[Opt], args: Vec<OsString>) -> Result<Parsed, Failure> {
    let mut r = Reader { command, known, rest: args.into_iter(), out: Parsed::default() };
    while let Some(arg) = r.rest.next() {
        let bytes = arg.as_bytes();
        if bytes == b"--" {
            r.out.operands.extend(r.rest.by_ref());
        } else if let Some(long) = bytes.strip_prefix(b"--") {
            r.long(long)?;
        } else if bytes.len() > 1 && bytes[0] == b'-' {
            r.cluster(&bytes[1..])?;
        } else {
            r.out.operands.push(arg);
        }
    }
    Ok(r.out)
}

impl Reader<'_> {
    fn long(&mut self, text: &[u8]) -> Result<(), Failure> {
        let (name, value) = match text.iter().position(|b| *b == b'=') {
            Some(i) => (&text[..i], Some(OsString::from_vec(text[i + 1..].to_vec()))),
            None => (text, None),
        };
        let shown = String::from_utf8_lossy(name).into_owned();
        let matching = |o: &&Opt| !o.long.is_empty() && o.long.as_bytes().starts_with(name);
        let exact = self.known.iter().find(|o| o.long.as_bytes() == name && !name.is_empty());
        let found = match exact {
            Some(o) => *o,
            None => {
                let mut candidates = self.known.iter().filter(matching);
                let first = candidates.next().copied();
                let first =
                    first.ok_or_else(|| self.usage(format!("unrecognized option '--{shown}'")))?;
                // Which one is meant does not matter if none of them is supported.
                if candidates.any(|o| o.id != first.id && (o.supported || first.supported)) {
                    return Err(self.usage(format!("option '--{shown}' is ambiguous")));
                }
                first
            }
        };
        self.supported(found, &format!("--{}", found.long))?;
        let value = match (found.takes, value) {
            (Takes::Nothing, Some(_)) => {
                return Err(
                    self.usage(format!("option '--{}' doesn't allow an argument", found.long))
                );
            }
            (Takes::Value, None) => Some(self.rest.next().ok_or_else(|| {
                self.usage(format!("option '--{}' requires an argument", found.long))
            })?),
            (_, v) => v,
        };
        self.out.options.push((found.id, value));
        Ok(())
    }

    fn cluster(&mut self, mut text: &[u8]) -> Result<(), Failure> {
        while let Some((&c, tail)) = text.split_first() {
            let c = char::from(c);
            let found = self.known.iter().find(|o| o.short == c && c != '\0').copied();
            let found = found.ok_or_else(|| self.usage(format!("invalid option -- '{c}'")))?;
            self.supported(found, &format!("-{c}"))?;
            if found.takes == Takes::Nothing {
                self.out.options.push((found.id, None));
                text = tail;
                continue;
            }
            let attached = (!tail.is_empty()).then(|| OsString::from_vec(tail.to_vec()));
            let value =
                match (found.takes, attached) {
                    (Takes::Value, None) => Some(self.rest.next().ok_or_else(|| {
                        self.usage(format!("option requires an argument -- '{c}'"))
                    })?),
                    (_, v) => v,
                };
            self.out.options.push((found.id, value));
            return Ok(());
        }
        Ok(())
    }

    fn supported(&self, o: Opt, shown: &str) -> Result<(), Failure> {
        if o.supported { Ok(()) } else { Err(Failure::unsupported(self.command, shown)) }
    }

    fn usage(&self, what: String) -> Failure {
        Failure::usage(self.command, what)
    }
}

#[cfg(test)]
mod tests {
    use super::{Takes::*, *};

    const KNOWN: &[Opt] = &[
        opt('c', "stripe-count", Value),
        opt('S', "stripe-size", Value),
        opt('r', "recursive", Nothing),
        opt('v', "verbose", Nothing),
        opt('m', "mdt", Optional),
        alias("stripe-count", '\0', "count", Value),
        lacking('E', "component-end", Value),
    ];

    fn run(args: &[&str]) -> Result<Parsed, Failure> {
        parse("test", KNOWN, args.iter().map(OsString::from).collect())
    }

    #[test]
    fn forms_of_getopt_long() {
        for args in [
            &["-c4", "f"][..],
            &["-c", "4", "f"],
            &["--stripe-count=4", "f"],
            &["--stripe-count", "4", "f"],
            &["--stripe-c", "4", "f"],
            &["--count=4", "f"],
            &["f", "-c", "4"],
            &["-c4", "--", "f"],
        ] {
            let p = run(args).unwrap();
            assert_eq!(p.text("stripe-count").as_deref(), Some("4"), "{args:?}");
            assert_eq!(p.operands, ["f"], "{args:?}");
        }
        let p = run(&["-rvc-1", "-"]).unwrap();
        assert!(p.has("recursive") && p.has("verbose"));
        assert_eq!(p.text("stripe-count").as_deref(), Some("-1"));
        assert_eq!(p.operands, ["-"]);
        assert_eq!(run(&["-m", "1"]).unwrap().operands, ["1"], "an optional value is attached");
        assert_eq!(run(&["-m1"]).unwrap().text("mdt").as_deref(), Some("1"));
        assert_eq!(run(&["--", "-c"]).unwrap().operands, ["-c"]);
        assert_eq!(run(&["-c1", "-c", "2"]).unwrap().text("stripe-count").as_deref(), Some("2"));
    }

    #[test]
    fn mistakes() {
        for (args, says) in [
            (&["--stripe"][..], "ambiguous"),
            (&["-x"], "invalid option -- 'x'"),
            (&["--nope"], "unrecognized option '--nope'"),
            (&["-c"], "requires an argument"),
            (&["--stripe-count"], "requires an argument"),
            (&["--recursive=1"], "doesn't allow"),
        ] {
            let e = run(args).unwrap_err();
            assert_eq!(e.code, libc::EINVAL);
            assert!(e.text.contains(says), "{args:?}: {}", e.text);
        }
        for args in [&["-E", "1M"][..], &["--component-end=1M"], &["--comp", "1M"]] {
            let e = run(args).unwrap_err();
            assert_eq!(e.code, libc::EOPNOTSUPP);
            assert!(e.text.contains("is not supported by StrakeFS"), "{}", e.text);
        }
    }
}
