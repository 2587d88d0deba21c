//! The benchmark's own logic: its rows, and that a strict run is refused if its tier changed.

#[path = "../../../client/tests/it/common/mod.rs"]
mod common;
#[path = "../../../gds-bridge/tests/it/served/mod.rs"]
mod served;

use served::Served;
use strake_fake_gpu::FakeGpu;
use strake_gds::{Options, Switch, Unavailable, status::TierStatus};

use super::*;

fn plan(at: &Served, policy: Policy, strict: bool) -> Plan {
    let options = Options { slots: 2, slot_bytes: 256 << 10, ..Options::default() };
    let setup =
        Setup { key: at.key.clone(), threads: 2, options, ..Setup::new(&at.mds, Memory::Host) };
    Plan {
        setup,
        path: "/bench".into(),
        loads: false,
        bytes: 4 << 20,
        threads: vec![1, 2],
        policy,
        strict,
    }
}

/// Opens a session, and prints a message where this machine does not allow pinning memory.
fn open(setup: &Setup) -> Result<Session, Error> {
    open_on(setup, &FakeGpu::new())
}

fn open_on(setup: &Setup, device: &FakeGpu) -> Result<Session, Error> {
    let s = Session::open_on(setup, Arc::new(device.clone()))?;
    let pinned = s.tiers()?.iter().any(|t| t.tier == "bounce-tcp" && t.available);
    if !pinned {
        println!("note: no memory can be locked here: {:?}", s.notice());
    }
    Ok(s)
}

#[test]
fn a_run_has_its_rows_and_ratios_and_leaves_nothing_behind() {
    let served = Served::new(2);
    let f = run_with(&plan(&served, Policy::Prefer, false), open).unwrap();
    assert_eq!((f.rows.iter().map(|r| r.threads).collect::<Vec<_>>(), f.gpu), (vec![1, 2], false));
    for r in &f.rows {
        assert_eq!((r.saved.as_ref().unwrap().moved(), r.loaded.moved()), (4 << 20, 4 << 20));
        let saves = [
            r.rates.save,
            r.save_and_fsync,
            f.ceiling.save,
            r.of_ceiling.save,
            f.pageable_loop.save,
        ];
        for n in [r.rates.load, f.ceiling.load, f.pageable_loop.load]
            .into_iter()
            .chain(saves.map(Option::unwrap))
        {
            assert!(n.is_finite() && n > 0.0);
        }
        assert!((r.of_ceiling.load * f.ceiling.load / r.rates.load - 1.0).abs() < 1e-6);
        for (of, all, n) in [
            (r.of_pageable_loop.load, f.pageable_loop.load, r.rates.load),
            (
                r.of_pageable_loop.save.unwrap(),
                f.pageable_loop.save.unwrap(),
                r.rates.save.unwrap(),
            ),
        ] {
            assert!((of * all / n - 1.0).abs() < 1e-6);
        }
    }
    assert!(served.cluster.mds.names().is_empty(), "the file is removed");
    let mut odd = plan(&served, Policy::Prefer, false);
    odd.bytes = (1 << 20) + 1;
    assert_eq!(run(&odd).unwrap_err().code, Code::Inval);
}

#[test]
fn a_file_that_is_there_is_loaded_and_stays_as_it_is() {
    let served = Served::new(2);
    let plan = Plan { loads: true, bytes: 64 << 20, ..plan(&served, Policy::Prefer, false) };
    assert_eq!(run_with(&plan, open).unwrap_err().code, Code::NoEnt);
    let s = open(&plan.setup).unwrap();
    let write = |path: &str, bytes: &[u8]| {
        let f = s.open_file(path, (libc::O_RDWR | libc::O_CREAT) as u32, 0o644).unwrap();
        s.write(&f, 0, bytes).unwrap();
        s.fsync(&f).unwrap();
        s.close(f).unwrap();
    };
    let data: Vec<u8> =
        (0..(3u32 << 20) + 77).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    write("/bench", &data);
    write("/small", &data[..77]);
    let f = run_with(&plan, open).unwrap();
    assert_eq!((f.loads, f.bytes, f.rows.len(), &f.refused), (true, 3 << 20, 2, &None));
    for r in &f.rows {
        assert_eq!(
            (r.loaded.moved(), &r.saved, r.rates.save, r.save_and_fsync),
            (3 << 20, &None, None, None)
        );
        assert!(r.rates.load > 0.0 && r.of_ceiling.load > 0.0 && r.of_ceiling.save.is_none());
        assert!(r.of_pageable_loop.load > 0.0 && r.of_pageable_loop.save.is_none());
    }
    // A run with fewer bytes uses only those.
    let less = run_with(&Plan { bytes: 1 << 20, threads: vec![1], ..plan.clone() }, open).unwrap();
    assert_eq!((less.bytes, less.rows[0].loaded.moved()), (1 << 20, 1 << 20));
    let e = run_with(&Plan { path: "/small".into(), ..plan }, open).unwrap_err();
    assert!(e.code == Code::Inval && e.message.contains("smaller than 1 MiB"), "{e}");
    let back = s.open_file("/bench", 0, 0).unwrap();
    assert!(
        s.size(&back).unwrap() == data.len() as u64
            && s.read(&back, 0, data.len()).unwrap() == data
    );
    s.close(back).unwrap();
}

fn broken() -> Fault {
    Fault::Driver { call: "cuMemcpyHtoDAsync", code: 999, name: "CUDA_ERROR_UNKNOWN".into() }
}

#[test]
fn a_strict_run_is_refused_when_its_tier_changes() {
    let served = Served::new(2);
    // Pinned memory fails from the second row on.
    let breaking = |rows: &mut u32, setup: &Setup| {
        let device = FakeGpu::new();
        let s = open_on(setup, &device)?;
        if !s.tiers()?.iter().any(|t| t.tier == "bounce-tcp" && t.available) {
            return Err(Error::new(Code::NoMem, "no memory can be locked here"));
        }
        *rows += 1;
        if *rows == 2 {
            device.fail_pinned_after(6, broken());
        }
        Ok(s)
    };
    let mut rows = 0;
    let f = run_with(&plan(&served, Policy::Require(Tier::BounceTcp), true), |s| {
        breaking(&mut rows, s)
    });
    let f = match f {
        Err(e) if e.message.contains("no memory can be locked") => return println!("skipped: {e}"),
        f => f.unwrap(),
    };
    let why = f.refused.unwrap();
    assert!(f.rows.len() == 1 && why.contains("999: CUDA_ERROR_UNKNOWN"), "{why}");
    assert!(served.cluster.mds.names().is_empty());
}

/// With every tier allowed the call succeeds, but the strict run is still refused.
#[test]
fn a_strict_run_is_refused_when_its_tier_changes_in_the_middle_though_the_policy_allows_it() {
    let served = Served::new(2);
    let rates = |s: &Session, tier: &str| {
        let of = |t: &TierStatus| Some([t.load_bytes_per_s?, t.save_bytes_per_s?]);
        s.tiers().unwrap().iter().find(|t| t.tier == tier).and_then(of)
    };
    // The call must begin with pinned memory, which depends on chance on host memory. In the second
    // row pinned memory stops working.
    let breaking = |rows: &mut u32, setup: &Setup| {
        for _ in 0..1000 {
            let device = FakeGpu::new();
            let s = open_on(setup, &device)?;
            let (Some(pinned), Some(other)) = (rates(&s, "bounce-tcp"), rates(&s, "pageable"))
            else {
                break;
            };
            if pinned[0] > other[0] && pinned[1] > other[1] {
                *rows += 1;
                if *rows == 2 {
                    device.fail_pinned_after(6, broken());
                }
                return Ok(s);
            }
        }
        Err(Error::new(Code::NoMem, "no memory can be locked here"))
    };
    for strict in [true, false] {
        let (mut rows, plan) = (0, plan(&served, Policy::Prefer, strict));
        let f = run_with(&plan, |s| breaking(&mut rows, s));
        let f = match f {
            Err(e) if e.message.contains("no memory can be locked") => {
                return println!("skipped: {e}");
            }
            f => f.unwrap(),
        };
        let saved = f.rows[1].saved.as_ref().unwrap();
        assert!(saved.by_tier[Tier::BounceTcp] > 0 && saved.by_tier[Tier::Pageable] > 0, "{saved}");
        // The figures in the JSON output add up, too.
        let json = serde_json::to_value(&f).unwrap();
        for report in
            json["rows"].as_array().unwrap().iter().flat_map(|r| [&r["saved"], &r["loaded"]])
        {
            for by in ["by_tier", "by_transport"] {
                let sum: u64 =
                    report[by].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
                assert_eq!(sum, f.bytes, "{report}");
            }
        }
        let why = f.refused.unwrap_or_default();
        let words = "the tier changed in the middle of a call, from bounce-tcp to pageable";
        assert_eq!((f.rows.len(), why.contains(words)), (2, strict), "{why}");
        assert!(served.cluster.mds.names().is_empty());
    }
}

#[test]
fn what_a_strict_run_refuses() {
    let served = Served::new(2);
    let mut f = run_with(&plan(&served, Policy::Require(Tier::Pageable), true), open).unwrap();
    assert_eq!(f.refused, None);
    let reports = |f: &Figures| {
        f.rows.iter().flat_map(|r| [r.saved.clone().unwrap(), r.loaded.clone()]).collect::<Vec<_>>()
    };
    assert_eq!(refusal(&reports(&f)), None);
    let (all, last) = (f.bytes, f.rows.len() - 1);
    f.rows[last].loaded.by_tier[Tier::Pageable] = all - 1;
    f.rows[last].loaded.by_tier[Tier::BounceTcp] = 1;
    let why = refusal(&reports(&f)).unwrap();
    assert!(why.contains("bounce-tcp") && why.contains("pageable"), "{why}");
    let to = Some(Tier::Pageable);
    let switch = Switch { after: 0, from: Tier::BounceTcp, to, why: Unavailable::NotTested };
    f.rows[0].saved.as_mut().unwrap().switches.push(switch);
    assert!(refusal(&reports(&f)).unwrap().contains("from bounce-tcp to pageable"));
}
