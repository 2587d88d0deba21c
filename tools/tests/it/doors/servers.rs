//! An attacker holds the clients' common key and poses as a metadata server.

use std::{
    fs,
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use strake_fabric::{Fabric, Identity, Message, Peer, Pool, Role, Service, TcpFabric};
use strake_proto::{Code, Error, Result};
use strake_runtime::{ClientKey, Env, keyfile::read_client};

use super::{Doors, can_mount};
use crate::common::{eventually, ok, refused, strake, text};

/// Counts the requests that clients trust it with.
#[derive(Default)]
struct Imposter(AtomicUsize);

#[async_trait]
impl Service for Imposter {
    async fn handle(&self, _: &Peer, _: Message) -> Result<Message> {
        self.0.fetch_add(1, SeqCst);
        Err(Error::new(Code::Access, "said the imposter"))
    }
}

/// The best server identity that a client's key file allows: no server key, and nothing to sign
/// with.
fn as_a_server(key: &ClientKey) -> Identity {
    Identity { role: Role::Server, ..Identity::client(ClientKey { servers: None, ..*key }) }
}

/// Waits until something is mounted there.
fn mounted(at: &Path) {
    eventually(format!("a mount at {}", at.display()), Duration::from_secs(60), || {
        fs::read_to_string("/proc/self/mounts").unwrap().contains(at.to_str().unwrap())
    });
}

#[test]
fn servers_are_told_from_clients_that_pose_as_one() {
    if !can_mount() {
        return;
    }
    let c = Doors::new();
    let mnt = c.root.path().join("mnt");
    c.up("022", "1", &mnt);
    let whole = c.key("client.key");
    let key = read_client(&whole).unwrap();
    assert!(key.servers.is_some(), "`strake up` gives clients the public half");
    // A key file of an older version, without the public key of the servers.
    let old = c.root.path().join("old.key");
    fs::write(&old, ClientKey { servers: None, ..key }.text()).unwrap();
    fs::set_permissions(&old, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();

    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let imposter = Arc::new(Imposter::default());
    let listener = runtime.block_on(async {
        let f = TcpFabric::new(
            Env::system(),
            as_a_server(&key),
            None,
            Pool::default(),
            Default::default(),
        );
        f.listen(&"tcp:127.0.0.1:0".parse().unwrap(), imposter.clone()).await.unwrap()
    });
    let at = c.root.path().join("m2");
    fs::create_dir(&at).unwrap();
    let mount = |server: &str, key: &Path| {
        let options = format!("retry=0,run_dir={}", c.root.path().join("run").display());
        let mut s = strake();
        s.args(["mount", "-f", "--client-key"])
            .arg(key)
            .arg(format!("{server}:/"))
            .arg(&at)
            .args(["-o", &options]);
        s
    };
    let false_one = listener.endpoint().to_string().replace("tcp:", "");
    let out = mount(&false_one, &whole).output().unwrap();
    refused(&out, &["did not prove to be a server", &false_one]);
    assert_eq!(imposter.0.load(SeqCst), 0, "it was told nothing");
    // Without the public half the client cannot detect the imposter. It warns once and says what to
    // do.
    let out = mount(&false_one, &old).output().unwrap();
    refused(&out, &["lacks its second line", "strake key client"]);
    assert!(imposter.0.load(SeqCst) > 0, "{}", text(&out.stderr));

    // Beside a true server the imposter does not delay the mount.
    let true_one = c.endpoint("mds1").replace("tcp:", "");
    let asked = imposter.0.load(SeqCst);
    let mut child =
        mount(&format!("{false_one},{true_one}"), &whole).stderr(Stdio::null()).spawn().unwrap();
    mounted(&at);
    ok(&strake().arg("umount").arg(&at).output().unwrap());
    child.wait().unwrap();
    assert_eq!(imposter.0.load(SeqCst), asked, "it was told nothing");

    // With true servers both key files work, and the old one is completed.
    for round in 0..2 {
        let mut child = mount(&true_one, &old).stderr(Stdio::null()).spawn().unwrap();
        mounted(&at);
        ok(&strake().arg("umount").arg(&at).output().unwrap());
        child.wait().unwrap();
        if round == 0 {
            assert_eq!(read_client(&old).unwrap().servers, None);
            let mut renew = strake();
            renew
                .args(["client-key", "-o"])
                .arg(&old)
                .arg("--cluster-key")
                .arg(c.key("cluster.key"));
            ok(&renew.output().unwrap());
        }
    }
    assert_eq!(read_client(&old).unwrap(), key);
    // `strake up` completes the key file of a cluster of an older version.
    fs::write(&whole, ClientKey { servers: None, ..key }.text()).unwrap();
    c.up("022", "1", &mnt);
    assert_eq!(read_client(&whole).unwrap(), key);
}
