//! Silent connections and incomplete frames.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use strake_fabric::{Endpoint, tcp::handshake};
use strake_proto::{
    frame::{HEADER_LEN, MAX_BODY, MAX_PAYLOAD},
    opcode, pb,
};

use super::{Victim, hands::frame, looks};

fn open(at: &Endpoint) -> TcpStream {
    let Endpoint::Tcp(host, port) = at else { unreachable!() };
    TcpStream::connect((host.as_str(), *port)).unwrap()
}

fn write_and_sync(v: &Victim, name: &str) -> Duration {
    let began = Instant::now();
    let mut f = fs::File::create(v.mount().join(name)).unwrap();
    for _ in 0..32 {
        f.write_all(&vec![7; 1 << 20]).unwrap();
    }
    f.sync_all().unwrap();
    began.elapsed()
}

/// A connection after the handshake, on which the test writes frames itself.
fn shaken(v: &Victim, at: &Endpoint) -> TcpStream {
    let s = open(at);
    s.set_nonblocking(true).unwrap();
    let s = v.runtime.block_on(async {
        let mut s = tokio::net::TcpStream::from_std(s).unwrap();
        let us = handshake::Party::new(v.identity(), None, [9; 32]);
        handshake::dial(&mut s, &us).await.unwrap();
        s.into_std().unwrap()
    });
    s.set_nonblocking(false).unwrap();
    s.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    s
}

#[test]
fn silent_connections_and_halves_of_frames_keep_nobody_out() {
    let Some(v) = Victim::new() else { return };
    let alone = write_and_sync(&v, "alone");
    // Without any key: more connections than a metadata server has places for. They send one byte
    // each, as the kernel keeps those that send none.
    let mut silent = Vec::new();
    for at in v.servers("mds") {
        silent.extend((0..2200).map(|_| {
            let mut s = open(&at);
            s.write_all(&[0]).unwrap();
            s
        }));
    }
    let began = Instant::now();
    let mut s = v.session();
    println!("among {} silent connections a session took {:?}", silent.len(), began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(5));
    let worst = looks(&v.mount(), Duration::from_secs(2));
    println!("looks took {worst:?}");
    assert!(worst < Duration::from_secs(1));

    // Incomplete payloads that would use all of a storage server's receive memory.
    let mut halves = Vec::new();
    for at in v.servers("oss") {
        for _ in 0..16 {
            let (mut s, body) = (shaken(&v, &at), [0; 96]);
            s.write_all(&frame(opcode::WRITE, 1, &body, &[], MAX_PAYLOAD)).unwrap();
            halves.push(s);
        }
    }
    // Incomplete bodies, at metadata servers.
    let body = vec![0; MAX_BODY as usize];
    for at in v.servers("mds") {
        for _ in 0..20 {
            let mut s = shaken(&v, &at);
            let whole = frame(opcode::META, 1, &body, &[], 0);
            s.write_all(&whole[..HEADER_LEN]).unwrap();
            let _ = s.write_all(&whole[HEADER_LEN + 1..]);
            halves.push(s);
        }
    }
    let among = write_and_sync(&v, "among");
    println!("32 MiB took {among:?} among halves of frames, {alone:?} before");
    assert!(among < alone * 3 + Duration::from_secs(2));
    s.run(&pb::Creds::default(), vec![]).unwrap();
    // Connections that do not continue are closed.
    for s in &mut halves {
        s.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut rest = Vec::new();
        let over = s.read_to_end(&mut rest);
        assert!(!matches!(&over, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock), "{over:?}");
    }
}
