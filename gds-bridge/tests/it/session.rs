//! Sessions over sockets to the in-memory cluster: files by path, replacing whole files, errors.

use std::{collections::BTreeMap, sync::Arc};

use crate::ram::{MIB, pattern};
use crate::served::Served;
use strake_fake_gpu::FakeGpu;
use strake_gds::{
    Direction, GpuMem, Options, Policy, Tier, Transfer,
    session::{Content, Memory, Session, Setup},
    tensors::{Dtype, New},
};
use strake_proto::{Code, Error};

const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);
const RDWR: u32 = 2;
const CREAT: u32 = libc::O_CREAT as u32;

fn setup(at: &Served) -> Setup {
    let options = Options { workers: 2, slots: 2, slot_bytes: 256 << 10, ..Options::default() };
    Setup { key: at.key.clone(), threads: 2, options, ..Setup::new(&at.mds, Memory::Host) }
}

/// Whether this process may lock enough memory for the pinned tiers.
fn pins(s: &Session) -> bool {
    let ok = s.tiers().unwrap().iter().any(|t| t.tier == "bounce-tcp" && t.available);
    if !ok {
        println!("skipped: no memory can be locked here: {:?}", s.notice());
    }
    ok
}

#[test]
fn a_file_is_replaced_whole_or_not_at_all() {
    let served = Served::new(3);
    let device = FakeGpu::new();
    let s = Session::open_on(&setup(&served), Arc::new(device.clone())).unwrap();
    if !pins(&s) {
        return;
    }
    let data = pattern(3, MIB + 77);
    let (a, b) = (device.alloc(MIB + 77).unwrap(), device.alloc(1000).unwrap());
    s.put(a, &data).unwrap();
    s.put(b, &data[..1000]).unwrap();

    let ranges = [(a, MIB + 77), (b, 1000)];
    let content = Content { head: b"a head of 18 bytes", device: &ranges };
    let r = s.replace("/model", 0o640, content, BOUNCE).unwrap();
    assert!(r.is_all(Tier::BounceTcp) && r.ranges == [MIB + 77, 1000], "{r}");
    let want = [&b"a head of 18 bytes"[..], &data, &data[..1000]].concat();
    let f = s.open_file("model", 0, 0).unwrap();
    assert_eq!(s.size(&f).unwrap(), want.len() as u64);
    assert!(s.read(&f, 0, want.len() + 10).unwrap() == want);

    // A device copy fails: the old file stays, and nothing else is left behind.
    device.fail_after(
        2,
        strake_gds::Fault::Driver { call: "cuMemcpyDtoHAsync", code: 719, name: "failed".into() },
    );
    let failed = s.replace("/model", 0o640, content, BOUNCE).unwrap_err();
    assert!(failed.error.code == Code::Io && failed.report.moved() < MIB, "{failed}");
    device.mend();
    assert!(s.read(&f, 0, want.len()).unwrap() == want);
    let no_room = |yes| served.cluster.oss.faults(|f| f.full = yes);
    no_room(true);
    let failed = s.replace("/model", 0o640, content, Policy::Prefer).unwrap_err();
    assert_eq!(failed.error.code, Code::NoSpc, "{failed}");
    no_room(false);
    assert!(s.read(&f, 0, want.len()).unwrap() == want);
    assert_eq!(served.cluster.mds.names(), [b"model".to_vec()]);

    // A new file replaces it; an open handle still sees the old one.
    let shorter = Content { head: b"", device: &ranges[1..] };
    s.replace("/model", 0o640, shorter, BOUNCE).unwrap();
    let g = s.open_file("/model", 0, 0).unwrap();
    assert_eq!(
        (s.size(&g).unwrap(), s.read(&f, 0, 18).unwrap()),
        (1000, b"a head of 18 bytes".to_vec())
    );
    assert_eq!(served.cluster.mds.names(), [b"model".to_vec()]);
    s.close(f).unwrap();
    s.close(g).unwrap();
}

/// The file is stable before it gets the name: the servers lose their unflushed state here, and no
/// client has the bytes left to resend.
#[test]
fn a_file_that_replaces_another_is_stable_when_it_has_the_name() {
    let served = Served::new(3);
    let s = Session::open(&setup(&served)).unwrap();
    let data = pattern(6, MIB + 77);
    let a = s.device().alloc(MIB + 77).unwrap();
    s.put(a, &data).unwrap();
    let ranges = [(a, MIB + 77)];
    s.replace("/model", 0o644, Content { head: b"a head", device: &ranges }, Policy::Prefer)
        .unwrap();
    served.cluster.restart(&[0, 1, 2]);
    let other = Session::open(&setup(&served)).unwrap();
    let f = other.open_file("/model", 0, 0).unwrap();
    let want = [&b"a head"[..], &data].concat();
    assert_eq!(other.size(&f).unwrap(), want.len() as u64);
    assert!(other.read(&f, 0, want.len()).unwrap() == want);
    other.close(f).unwrap();
}

#[test]
fn ranges_are_loaded_and_saved_and_errors_have_their_codes() {
    let served = Served::new(2);
    let s = Session::open(&setup(&served)).unwrap();
    let device = s.device().clone();
    let data = pattern(5, MIB);
    let mine = device.alloc(MIB).unwrap();
    s.put(mine, &data).unwrap();
    let mut back = vec![0; MIB as usize];
    s.get(mine, &mut back).unwrap();
    assert!(back == data);
    assert!(s.put(mine + 1, &data).is_err() && s.get(7, &mut back).is_err());

    let f = Arc::new(s.open_file("/f", RDWR | CREAT, 0o644).unwrap());
    let range = |gpu, len| [Transfer { file: f.clone(), offset: 5, gpu, len }];
    let r = s.save(&range(mine, MIB), Policy::Prefer).unwrap();
    assert_eq!(r.moved(), MIB);
    s.fsync(&f).unwrap();
    let other = device.alloc(MIB).unwrap();
    s.load(&range(other, MIB), Policy::Prefer).unwrap();
    s.get(other, &mut back).unwrap();
    assert!(back == data);
    assert_eq!(s.load(&range(other, MIB + 1), Policy::Prefer).unwrap_err().error.code, Code::Inval);
    assert_eq!(s.load(&range(4096, 1), Policy::Prefer).unwrap_err().error.code, Code::Inval);

    let code = |r: Result<strake_client::File, Error>| r.err().map(|e| e.code);
    assert_eq!(code(s.open_file("/none", 0, 0)), Some(Code::NoEnt));
    assert_eq!(code(s.open_file("/none/x", 0, 0)), Some(Code::NoEnt));
    assert_eq!(code(s.open_file("/f/x", 0, 0)), Some(Code::NotDir));
    assert_eq!(code(s.open_file("/", 0, 0)), Some(Code::Inval));
    assert_eq!(code(s.open_file("/f", RDWR | CREAT | libc::O_EXCL as u32, 0)), Some(Code::Exist));
    assert_eq!(code(s.open_file(&"x/".repeat(3000), 0, 0)), Some(Code::NameTooLong));
    s.rename("/f", "/g").unwrap();
    assert_eq!(code(s.open_file("/f", 0, 0)), Some(Code::NoEnt));
    s.unlink("/g").unwrap();
    assert_eq!(s.unlink("/g").unwrap_err().code, Code::NoEnt);
}

#[test]
fn tensors_are_saved_and_loaded_as_safetensors() {
    let served = Served::new(3);
    let s = Session::open(&setup(&served)).unwrap();
    let device = s.device().clone();
    let (w, b) = (pattern(1, 2 * MIB), pattern(2, 33));
    let (wide, bytes) = (device.alloc(2 * MIB).unwrap(), device.alloc(33).unwrap());
    s.put(wide, &w).unwrap();
    s.put(bytes, &b).unwrap();
    let new = |name: &str, dtype, shape: &[usize], gpu| New {
        name: name.into(),
        dtype,
        shape: shape.into(),
        gpu,
    };
    let tensors =
        [new("bytes", Dtype::U8, &[3, 11], bytes), new("wide", Dtype::F32, &[512, 1024], wide)];
    let notes = BTreeMap::from([("format".to_string(), "pt".to_string())]);
    let r = s.save_tensors("/m", 0o644, &tensors, &notes, Policy::Prefer).unwrap();
    assert_eq!(r.moved(), 2 * MIB + 33);
    s.save_tensors("/n", 0o644, &tensors[..1], &notes, Policy::Prefer).unwrap();

    // Two files in one call, each into one piece of memory.
    let files = ["/m", "/n"].map(|p| s.open_tensors(p).unwrap());
    let blocks = files.each_ref().map(|f| device.alloc(f.header.layout().1).unwrap());
    let all: Vec<Transfer> = files.iter().zip(blocks).flat_map(|(f, b)| f.to_block(b)).collect();
    assert_eq!(all.len(), 2, "tensors that lie side by side are one range");
    let r = s.load(&all, Policy::Prefer).unwrap();
    assert_eq!(r.ranges, [2 * MIB + 33, 33]);
    let at = |addr, len: u64| {
        let mut v = vec![0; len as usize];
        s.get(addr, &mut v).unwrap();
        v
    };
    assert!(
        at(blocks[0], 2 * MIB) == w && at(blocks[0] + 2 * MIB, 33) == b && at(blocks[1], 33) == b
    );

    // Load into existing memory, and only the selected tensor.
    let to = device.alloc(33).unwrap();
    let all = files[0].to_places(|n| (n == "bytes").then_some((to, 33))).unwrap();
    assert_eq!(s.load(&all, Policy::Prefer).unwrap().moved(), 33);
    assert_eq!(at(to, 33), b);
    let e = files[0].to_places(|_| Some((to, 33))).map(drop).unwrap_err();
    assert!(e.code == Code::Inval && e.message.contains("tensor 'wide' has 2097152 bytes"), "{e}");

    // A truncated file is refused before anything moves.
    let f = s.open_file("/n", RDWR, 0).unwrap();
    served.block_on(f.truncate(60)).unwrap();
    let e = s.open_tensors("/n").err().unwrap();
    assert!(e.code == Code::Inval && e.message.contains("'/n'"), "{e}");
}

#[test]
fn what_cannot_be_opened_says_why() {
    let served = Served::new(2);
    let open = |change: &dyn Fn(&mut Setup)| {
        let mut s = setup(&served);
        change(&mut s);
        Session::open(&s).map(drop).unwrap_err()
    };
    let e = open(&|s| s.mds.clear());
    assert!(e.code == Code::Inval && e.message.contains("no metadata server"), "{e}");
    assert_eq!(open(&|s| s.mds = vec!["a b".into()]).code, Code::Inval);
    assert_eq!(open(&|s| s.key = "/none".into()).code, Code::NoEnt);
    assert_eq!(open(&|s| s.threads = 0).code, Code::Inval);
    assert_eq!(open(&|s| s.options.slots = 1).code, Code::Inval);
    match strake_gds::Cuda::open(0) {
        Ok(_) => println!("skipped: this machine has a GPU"),
        Err(why) => {
            let e = open(&|s| s.memory = Memory::Cuda(0));
            assert!(e.code == Code::NoDev && e.message == why.to_string(), "{e}");
        }
    }
    for (text, is) in
        [("host", Memory::Host), ("cuda", Memory::Cuda(0)), ("cuda:3", Memory::Cuda(3))]
    {
        assert_eq!(text.parse::<Memory>().unwrap(), is);
    }
    for bad in ["", "cuda:", "cuda:-1", "gpu", "host:0"] {
        assert!(bad.parse::<Memory>().unwrap_err().message.contains("cuda:N"), "{bad}");
    }
}

/// A load ordered after a busy stream waits for it while other calls go on. It does not wait for
/// work that the stream gets later.
#[test]
fn calls_in_the_order_of_a_stream_go_on_beside_the_program() {
    let served = Served::new(3);
    let device = FakeGpu::new();
    let s = Arc::new(Session::open_on(&setup(&served), Arc::new(device.clone())).unwrap());
    let data = pattern(8, MIB + 5);
    let f = Arc::new(s.open_file("/f", RDWR | CREAT, 0o600).unwrap());
    s.write(&f, 0, &data).unwrap();
    let (a, b) = (device.alloc(MIB + 5).unwrap(), device.alloc(MIB + 5).unwrap());
    let to = |gpu| vec![Transfer { file: f.clone(), offset: 0, gpu, len: MIB + 5 }];
    device.poke(a, &[9; 100]).unwrap();
    device.occupy(7, true);
    // SAFETY: its streams are plain numbers.
    let started = unsafe { s.start(Direction::Load, to(a), Policy::Prefer, 7) }.unwrap();
    s.load(&to(b), Policy::Prefer).unwrap();
    // SAFETY: as above.
    let other = unsafe { s.start(Direction::Load, to(b), Policy::Prefer, 0) }.unwrap();
    assert_eq!(other.finish().unwrap().moved(), MIB + 5);
    assert!(!started.is_done() && device.peek(a, 100).unwrap() == [9; 100]);
    device.occupy(7, false);
    let r = started.finish().unwrap();
    assert!(r.moved() == MIB + 5 && device.peek(a, MIB + 5).unwrap() == data, "{r}");

    // The other direction: a save begins when the stream has produced the data.
    device.occupy(7, true);
    // SAFETY: as above.
    let started = unsafe { s.start(Direction::Save, to(b), Policy::Prefer, 7) }.unwrap();
    device.poke(b, &[5; 100]).unwrap();
    device.occupy(7, false);
    started.finish().unwrap();
    assert!(s.read(&f, 0, 101).unwrap() == [&[5; 100][..], &data[100..101]].concat());

    // Errors are reported by `finish`, which need not be called. SAFETY: as above.
    let wrong = unsafe { s.start(Direction::Load, to(4096), Policy::Prefer, 0) }.unwrap();
    let failed = wrong.finish().unwrap_err();
    assert!(failed.error.code == Code::Inval && failed.report.moved() == 0, "{failed}");
    // SAFETY: as above.
    drop(unsafe { s.start(Direction::Load, to(a), Policy::Prefer, 0) }.unwrap());
    device.destroy();
    // SAFETY: as above.
    let gone = unsafe { s.start(Direction::Load, to(a), Policy::Prefer, 0) };
    assert_eq!(gone.err().unwrap().code, Code::NoDev);
}
