//! An interpreter for PTX text: the part of the language that the kernels of this crate use, one
//! thread after the other. It matches each instruction by its full name, so an instruction that is
//! not implemented here is an error. Memory accesses are checked to the byte.

use std::collections::HashMap;

/// A kernel of a module.
pub struct Kernel {
    params: Vec<(String, usize)>,
    /// The instructions, without labels.
    code: Vec<Instruction>,
    labels: HashMap<String, usize>,
    consts: HashMap<String, u64>,
    const_bytes: Vec<u8>,
}

struct Instruction {
    /// The predicate that it depends on, and the value that the predicate must have.
    guard: Option<(String, bool)>,
    name: String,
    operands: Vec<String>,
}

/// Constants have addresses from here on, below all addresses of global memory.
const CONST_BASE: u64 = 0x1000;
/// A thread that takes more steps than this counts as an endless loop.
const MOST_STEPS: usize = 10_000_000;

/// Global memory: pieces by their first addresses.
#[derive(Default)]
pub struct Memory(pub Vec<(u64, Vec<u8>)>);

impl Memory {
    fn at(&mut self, addr: u64, len: usize) -> &mut [u8] {
        let piece = self
            .0
            .iter_mut()
            .find(|(base, b)| addr >= *base && addr + len as u64 <= *base + b.len() as u64);
        let (base, bytes) =
            piece.unwrap_or_else(|| panic!("{len} bytes at {addr:#x}, which no memory has"));
        let at = (addr - *base) as usize;
        &mut bytes[at..at + len]
    }
}

fn without_comments(text: &str) -> String {
    text.lines().map(|l| l.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

fn number(s: &str) -> Option<u64> {
    s.strip_prefix("0x").map_or_else(|| s.parse().ok(), |h| u64::from_str_radix(h, 16).ok())
}

fn between(s: &str, open: char, close: char) -> (&str, &str) {
    let (_, rest) = s.split_once(open).expect("a bracket");
    rest.split_once(close).expect("its end")
}

impl Kernel {
    /// The kernel of this name.
    pub fn parse(module: &str, entry: &str) -> Kernel {
        let text = without_comments(module);
        let (head, rest) =
            text.split_once(&format!(".visible .entry {entry}")).expect("the kernel");
        for needed in [".version 6.", ".target sm_50", ".address_size 64"] {
            assert!(head.contains(needed), "{needed}");
        }
        let (params, rest) = between(rest, '(', ')');
        let (body, _) = between(rest, '{', '}');
        let params = params.split(',').map(|p| {
            let words: Vec<&str> = p.split_whitespace().collect();
            let [".param", ty, name] = words[..] else { panic!("parameter {p}") };
            (name.to_string(), width(ty))
        });
        let mut k = Kernel {
            params: params.collect(),
            code: Vec::new(),
            labels: HashMap::new(),
            consts: HashMap::new(),
            const_bytes: Vec::new(),
        };
        for c in head.split(".const").skip(1) {
            let name = c
                .split_whitespace()
                .find(|w| w.contains('['))
                .expect("a name")
                .split('[')
                .next()
                .unwrap();
            k.consts.insert(name.into(), CONST_BASE + k.const_bytes.len() as u64);
            for n in between(c, '{', '}').0.split(',') {
                k.const_bytes.extend((number(n.trim()).expect("a constant") as u32).to_le_bytes());
            }
        }
        for mut statement in
            body.split(';').map(str::trim).filter(|s| !s.is_empty() && !s.starts_with(".reg"))
        {
            while let Some((label, rest)) = statement.split_once(':') {
                k.labels.insert(label.trim().into(), k.code.len());
                statement = rest.trim();
            }
            k.code.push(Instruction::parse(statement));
        }
        k
    }

    /// Runs the kernel in `blocks` blocks of `threads` threads.
    pub fn launch(&self, (blocks, threads): (u32, u32), args: &[u64], memory: &mut Memory) {
        assert_eq!(args.len(), self.params.len());
        for n in 0..u64::from(blocks * threads) {
            let special = [
                ("%ctaid.x", n / u64::from(threads)),
                ("%ntid.x", threads.into()),
                ("%tid.x", n % u64::from(threads)),
            ];
            let mut t = Thread { kernel: self, args, registers: HashMap::new(), at: 0 };
            t.registers.extend(special.map(|(name, v)| (name.to_string(), v)));
            let mut steps = 0;
            while t.step(memory) {
                steps += 1;
                assert!(steps < MOST_STEPS, "thread {n} does not end");
            }
        }
    }
}

impl Instruction {
    fn parse(s: &str) -> Instruction {
        let (guard, s) = match s.strip_prefix('@') {
            Some(s) => {
                let (p, rest) =
                    s.split_once(char::is_whitespace).expect("an instruction behind its guard");
                let unless = p.strip_prefix('!');
                (Some((unless.unwrap_or(p).to_string(), unless.is_none())), rest.trim())
            }
            None => (None, s),
        };
        let (name, operands) = s.split_once(char::is_whitespace).unwrap_or((s, ""));
        let operands = operands.split(',').map(|o| o.trim().trim_matches(['[', ']']).to_string());
        Instruction {
            guard,
            name: name.into(),
            operands: operands.filter(|o| !o.is_empty()).collect(),
        }
    }
}

/// Bytes of a type.
fn width(ty: &str) -> usize {
    match ty.trim_start_matches('.') {
        "u8" => 1,
        "u32" | "b32" => 4,
        "u64" | "b64" => 8,
        other => panic!("type {other}"),
    }
}

struct Thread<'a> {
    kernel: &'a Kernel,
    args: &'a [u64],
    registers: HashMap<String, u64>,
    at: usize,
}

impl Thread<'_> {
    fn value(&self, operand: &str) -> u64 {
        if let Some(n) = number(operand).or_else(|| self.kernel.consts.get(operand).copied()) {
            return n;
        }
        *self.registers.get(operand).unwrap_or_else(|| panic!("{operand} is read before it is set"))
    }

    /// Runs one instruction. Returns false when the thread has ended.
    fn step(&mut self, memory: &mut Memory) -> bool {
        let i = &self.kernel.code[self.at];
        self.at += 1;
        if i.guard.as_ref().is_some_and(|(p, wanted)| (self.value(p) != 0) != *wanted) {
            return true;
        }
        let o = |n: usize| i.operands[n].as_str();
        let v = |n: usize| self.value(o(n));
        let low = |n: u64| n & u64::from(u32::MAX);
        let result = match i.name.as_str() {
            "ret" => return false,
            "bra" => {
                self.at = *self.kernel.labels.get(o(0)).unwrap_or_else(|| panic!("label {}", o(0)));
                return true;
            }
            "ld.param.u64" | "ld.param.u32" => {
                let n = self
                    .kernel
                    .params
                    .iter()
                    .position(|(name, _)| name == o(1))
                    .expect("a parameter");
                let bytes = width(&i.name[8..]);
                assert_eq!(self.kernel.params[n].1, bytes, "{}", o(1));
                if bytes == 4 { low(self.args[n]) } else { self.args[n] }
            }
            "ld.global.u8" => memory.at(v(1), 1)[0].into(),
            "ld.const.u32" => {
                let at = (v(1) - CONST_BASE) as usize;
                assert!(at.is_multiple_of(4), "a word that is not aligned");
                u32::from_le_bytes(self.kernel.const_bytes[at..at + 4].try_into().unwrap()).into()
            }
            "st.global.u32" => {
                assert!(v(0).is_multiple_of(4), "a word that is not aligned");
                memory.at(v(0), 4).copy_from_slice(&(v(1) as u32).to_le_bytes());
                return true;
            }
            "mov.u32" => low(v(1)),
            "mov.u64" | "cvta.to.global.u64" => v(1),
            "cvt.u64.u32" => low(v(1)),
            "mad.lo.u32" => low(low(v(1)) * low(v(2)) + low(v(3))),
            "mul.wide.u32" => low(v(1)) * low(v(2)),
            "mul.lo.u32" => low(low(v(1)).wrapping_mul(low(v(2)))),
            "add.u32" => low(v(1).wrapping_add(v(2))),
            "sub.u64" => v(1).wrapping_sub(v(2)),
            "add.u64" => v(1).wrapping_add(v(2)),
            "min.u64" => v(1).min(v(2)),
            "and.b32" => low(v(1) & v(2)),
            "xor.b32" => low(v(1) ^ v(2)),
            "not.b32" => low(!v(1)),
            "shr.u32" => low(v(1)).checked_shr(v(2) as u32).unwrap_or(0),
            "setp.ge.u64" => (v(1) >= v(2)).into(),
            "setp.ne.u32" => (low(v(1)) != low(v(2))).into(),
            "setp.lt.u64" => (v(1) < v(2)).into(),
            other => panic!("instruction {other} is not known here"),
        };
        self.registers.insert(o(0).into(), result);
        true
    }
}
