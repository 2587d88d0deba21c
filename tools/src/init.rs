//! `strake init`: writes the keys and the configuration files of one host of a new cluster.

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead, IsTerminal, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use serde_json::json;
use strake_fabric::{Endpoint, endpoint::MDS_PORT};
use strake_proto::{Code, Error, Result};
use strake_runtime::ClientKey;
use strake_term::size;

use crate::{config, key, mount::source, server_config};

#[derive(Args)]
pub struct InitArgs {
    /// Hosts with metadata servers, HOST[:PORT] by commas: one, three or five, the same list on
    /// each host. Asked for if it is left out.
    #[arg(long, value_delimiter = ',')]
    mds: Vec<String>,
    /// This host, by the name at which the others reach it [default: its host name].
    #[arg(long)]
    host: Option<String>,
    /// Folder for file data on a disk of its own, as FOLDER or FOLDER=GIB. May be given several
    /// times; without it no storage server is set up. By default nine tenths of the disk are used.
    #[arg(long)]
    target: Vec<String>,
    /// Copies of each file's data [default: 2, and 1 on one host].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3))]
    copies: Option<u32>,
    /// Targets of the whole cluster that are waited for at the start [default: as many on each host
    /// as on this one].
    #[arg(long)]
    expect_targets: Option<u32>,
    /// What fails together with this host: its rack, room or switch.
    #[arg(long)]
    rack: Option<String>,
    /// Folder for the keys and the configuration files. Commands look for `admin.toml` in
    /// /etc/strake only.
    #[arg(long, default_value = "/etc/strake")]
    etc: PathBuf,
    /// Folder for the metadata, on a disk with fast fsync.
    #[arg(long, default_value = "/var/lib/strake/mds")]
    metadata: PathBuf,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// Where a storage server listens; its administration at the next port.
const OSS_PORT: u16 = 7410;
/// Ports that are tried for it.
const PORTS: u16 = 40;

/// What the files are made from.
struct Host {
    /// All metadata servers, `HOST:PORT`.
    mds: Vec<String>,
    name: String,
    /// Its place among the metadata servers, from 1.
    id: Option<usize>,
    /// Folders and their sizes in bytes.
    targets: Vec<(PathBuf, u64)>,
    copies: u32,
    expect: u32,
    rack: Option<String>,
    etc: PathBuf,
    metadata: PathBuf,
    oss_port: u16,
}

fn inval(m: impl Into<String>) -> Error {
    Error::new(Code::Inval, m)
}

pub fn init(args: &InitArgs) -> Result<ExitCode> {
    let host = host(args)?;
    fs::create_dir_all(&host.etc)
        .map_err(|e| Error::from(e).context(host.etc.display().to_string()))?;
    let files = host.files()?;
    for (path, text) in &files {
        differs(path, text)?;
    }
    let (cluster, client) = (host.etc.join("cluster.key"), host.etc.join("client.key"));
    let mut wrote = Vec::new();
    let key = match cluster.exists() {
        true => config::read_key(&cluster)?,
        false if host.id == Some(1) => {
            wrote.push(cluster.clone());
            key::new(&cluster)?
        }
        false => {
            let first = &host.mds[0];
            let m = format!(
                "{} is not there: run `strake init` on {first} first, then copy the file from it, \
                 with mode 0600",
                cluster.display()
            );
            return Err(Error::new(Code::NoEnt, m));
        }
    };
    if config::write_client_key(&client, &ClientKey::of(&key))? {
        wrote.push(client);
    }
    for (path, text) in &files {
        if !path.exists() {
            fs::write(path, text)
                .map_err(|e| Error::from(e).context(path.display().to_string()))?;
            wrote.push(path.clone());
        }
    }
    let next = host.next();
    match args.json {
        true => println!("{:#}", json!({ "wrote": wrote, "next": next })),
        false => {
            wrote.iter().for_each(|p| println!("wrote {}", p.display()));
            if wrote.is_empty() {
                println!("everything is there already; nothing was changed");
            }
            println!("next:");
            next.iter().for_each(|line| println!("  {line}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses to replace a file that says something else.
fn differs(path: &Path, text: &str) -> Result<()> {
    match fs::read_to_string(path) {
        Ok(had) if had != *text => Err(Error::new(
            Code::Exist,
            format!(
                "{} is there and says something else; edit it, or remove it and run this again",
                path.display()
            ),
        )),
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::from(e).context(path.display().to_string()))
        }
        _ => Ok(()),
    }
}

/// The answer to a question, if there is somebody to ask.
fn answer(question: &str) -> Result<String> {
    if !std::io::stdin().is_terminal() {
        return Ok(String::new());
    }
    print!("{question}: ");
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line.trim().to_string())
}

fn host(args: &InitArgs) -> Result<Host> {
    let (mut mds, mut name, mut targets) =
        (args.mds.clone(), args.host.clone(), args.target.clone());
    if mds.is_empty() {
        let list = answer("hosts with metadata servers, by commas, the same list on each host")?;
        mds = list.split(',').map(str::trim).filter(|s| !s.is_empty()).map(String::from).collect();
        let own = answer("this host, by the name at which the others reach it [host name]")?;
        name = name.or_else(|| Some(own).filter(|o| !o.is_empty()));
        let folders = answer("folders for file data, by commas [none]")?;
        let folders = folders.split(',').map(str::trim).filter(|s| !s.is_empty());
        targets.extend(folders.map(String::from));
    }
    let mds = mds
        .iter()
        .map(|m| source::server(m).ok_or_else(|| inval(format!("'{m}' is not HOST[:PORT]"))))
        .collect::<Result<Vec<_>>>()?;
    if mds.is_empty() {
        return Err(inval("which hosts have metadata servers? Name them by --mds HOST,..."));
    }
    let hosts: Vec<String> = mds.iter().map(|m| host_of(m)).collect();
    if mds.iter().any(|m| port_of(m) == u16::MAX) {
        let m = "the port after a metadata server's is for its administration: 65534 is the last";
        return Err(inval(m));
    }
    let name = name.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into());
    // A host may know itself by its full name.
    let short = name.split('.').next().unwrap_or(&name);
    let is = |wanted: &str| hosts.iter().position(|h| h == wanted);
    let place = is(&name).or_else(|| is(short));
    let id = place.map(|i| i + 1);
    let name = place.map_or(name.clone(), |i| hosts[i].clone());
    if id.is_none() && targets.is_empty() {
        let m = format!(
            "nothing is to run on this host: '{name}' is not among {}, and no --target is given. \
             Is its name another one (--host)?",
            hosts.join(", ")
        );
        return Err(inval(m));
    }
    let targets = targets.iter().map(|t| target(t)).collect::<Result<Vec<_>>>()?;
    let expect = u32::try_from(targets.len() * mds.len()).unwrap_or(u32::MAX);
    let copies = args.copies.unwrap_or(if mds.len() > 1 { 2 } else { 1 });
    let mut host = Host {
        name,
        id,
        copies,
        expect: args.expect_targets.unwrap_or(expect).max(1),
        rack: args.rack.clone(),
        etc: args.etc.clone(),
        metadata: args.metadata.clone(),
        oss_port: OSS_PORT,
        mds,
        targets,
    };
    host.find_ports()?;
    Ok(host)
}

fn host_of(at: &str) -> String {
    match at.parse() {
        Ok(Endpoint::Tcp(host, _)) => host,
        _ => at.to_string(),
    }
}

fn port_of(at: &str) -> u16 {
    match at.parse() {
        Ok(Endpoint::Tcp(_, port)) => port,
        _ => MDS_PORT,
    }
}

/// A target's folder and size. The size is compared with the disk.
fn target(text: &str) -> Result<(PathBuf, u64)> {
    let (path, gib) = match text.rsplit_once('=') {
        Some((path, gib)) => {
            let gib: u64 = gib
                .parse()
                .map_err(|_| inval(format!("target '{text}': '{gib}' is not a size in GiB")))?;
            (path, Some(gib))
        }
        None => (text, None),
    };
    let path = Path::new(path);
    if !path.is_absolute() {
        return Err(inval(format!("target '{text}': the folder must begin with '/'")));
    }
    let there = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let disk = rustix::fs::statvfs(there)
        .map_err(|e| Error::from(std::io::Error::from(e)).context(there.display().to_string()))?;
    let all = disk.f_blocks.saturating_mul(disk.f_frsize);
    let most = (all / 10 * 9) >> 30;
    let gib = gib.unwrap_or(most);
    if gib == 0 || gib > most {
        let m = format!(
            "target {}: {gib} GiB; the disk has {}, and a tenth must stay free: 1 to {most} GiB",
            path.display(),
            size(all)
        );
        return Err(Error::new(Code::NoSpc, m));
    }
    Ok((path.to_path_buf(), gib << 30))
}

impl Host {
    /// Looks whether the ports are free. Those of a host that has its files already are not looked
    /// at: its servers may run.
    fn find_ports(&mut self) -> Result<()> {
        let is_free = |port: u16| TcpListener::bind(("0.0.0.0", port)).is_ok();
        if let Some(id) = self.id
            && !self.mds_file(id).exists()
        {
            let port = port_of(&self.mds[id - 1]);
            if let Some(taken) = [port, port + 1].into_iter().find(|p| !is_free(*p)) {
                let m = format!(
                    "port {taken} of this host is in use: give the metadata server another one, as \
                     --mds {}:PORT in the list of every host",
                    self.name
                );
                return Err(Error::new(Code::Busy, m));
            }
        }
        if !self.targets.is_empty() && !self.oss_file().exists() {
            let own = self.id.map(|id| port_of(&self.mds[id - 1]));
            let clear = |p: &u16| {
                own.is_none_or(|o| *p > o + 1 || *p + 1 < o) && is_free(*p) && is_free(*p + 1)
            };
            let mut ports = (OSS_PORT..OSS_PORT + PORTS).step_by(2);
            self.oss_port = ports.find(clear).ok_or_else(|| {
                Error::new(
                    Code::Busy,
                    format!("ports {OSS_PORT} to {} are in use", OSS_PORT + PORTS),
                )
            })?;
        }
        Ok(())
    }

    /// The instance of the systemd units.
    fn instance(&self) -> String {
        self.id.map_or_else(|| self.name.clone(), |id| id.to_string())
    }

    fn mds_file(&self, id: usize) -> PathBuf {
        self.etc.join(format!("mds-{id}.toml"))
    }

    fn oss_file(&self) -> PathBuf {
        self.etc.join(format!("oss-{}.toml", self.instance()))
    }

    /// The files, each checked as its program does.
    fn files(&self) -> Result<Vec<(PathBuf, String)>> {
        let mut all = vec![(self.etc.join("admin.toml"), self.admin())];
        if let Some(id) = self.id {
            let text = self.of_mds(id);
            server_config::check_mds(&text)?;
            all.push((self.mds_file(id), text));
        }
        if !self.targets.is_empty() {
            // What was chosen at the first time stays.
            let had = fs::read_to_string(self.oss_file()).ok();
            let text = match had {
                Some(had) if had == self.of_oss(port_in(&had)) => had,
                _ => self.of_oss(self.oss_port),
            };
            server_config::check_oss(&text)?;
            all.push((self.oss_file(), text));
        }
        Ok(all)
    }

    fn endpoints(&self) -> Vec<String> {
        self.mds.iter().map(|m| format!("tcp:{m}")).collect()
    }

    fn admin(&self) -> String {
        format!(
            "# How commands find the cluster: docs/operations.md, \"How commands find the cluster\".\n\
             mds = {:?}\ncluster_key = {:?}\n",
            self.mds,
            self.etc.join("cluster.key")
        )
    }

    fn of_mds(&self, id: usize) -> String {
        let at = &self.mds[id - 1];
        let port = port_of(at);
        let peers: Vec<String> =
            self.endpoints().iter().enumerate().map(|(i, e)| format!("{}={e}", i + 1)).collect();
        format!(
            "# The metadata server of {name}. Every key: docs/operations.md.\n\
             cluster_key = {key:?}\n\n\
             [mds]\n\
             # Its number in the group. No other server ever gets it, not even when this one's disk is lost.\n\
             id = {id}\n\
             name = {name:?}\n\
             listen = \"tcp:0.0.0.0:{port}\"\n\
             # Where the others reach it.\n\
             advertise = \"tcp:{at}\"\n\
             # Administration; needs the cluster key.\n\
             admin = \"0.0.0.0:{admin}\"\n\
             # All metadata servers, the same on each of them.\n\
             peers = {peers:?}\n\
             # The metadata and its log: a disk with fast fsync.\n\
             dir = {dir:?}\n\
             # Used when the cluster is made: copies of each file's data, and how many targets are\n\
             # waited for before the first chains are made.\n\
             default_copies = {copies}\n\
             expect_targets = {expect}\n",
            name = self.name,
            key = self.etc.join("cluster.key"),
            admin = port + 1,
            dir = self.metadata,
            copies = self.copies,
            expect = self.expect,
        )
    }

    fn of_oss(&self, port: u16) -> String {
        let mut s = format!(
            "# The storage server of {name}. Every key: docs/operations.md.\n\
             cluster_key = {key:?}\n\n\
             [oss]\n\
             # The host's name: a mount there reads from this server first.\n\
             name = {name:?}\n\
             listen = \"tcp:0.0.0.0:{port}\"\n\
             advertise = \"tcp:{at}:{port}\"\n\
             admin = \"0.0.0.0:{admin}\"\n\
             mds = {mds:?}\n",
            name = self.name,
            key = self.etc.join("cluster.key"),
            at = self.name,
            admin = port + 1,
            mds = self.endpoints(),
        );
        if let Some(rack) = &self.rack {
            let _ = writeln!(s, "# What fails together with it.\nrack = {rack:?}");
        }
        for (path, bytes) in &self.targets {
            let _ = write!(
                s,
                "\n[[oss.targets]]\npath = {path:?}\n# Bytes. A tenth of the disk stays free for its table.\n\
                 size = {bytes}\n\
                 # Once the target has been made: a disk that is not mounted is not taken for a new one.\n\
                 # create = false\n"
            );
        }
        s
    }

    /// What to do then, in lines.
    fn next(&self) -> Vec<String> {
        let mut all = Vec::new();
        if self.id == Some(1) && self.mds.len() > 1 {
            let others: Vec<String> = self.mds[1..].iter().map(|m| host_of(m)).collect();
            let etc = self.etc.display();
            for h in &others {
                all.push(format!("scp -p {etc}/*.key {h}:{etc}/"));
            }
            all.push(format!("strake init on {}", others.join(", ")));
        }
        let mut units = Vec::new();
        if let Some(id) = self.id {
            units.push(format!("strake-mds@{id}"));
        }
        if !self.targets.is_empty() {
            units.push(format!("strake-oss@{}", self.instance()));
        }
        all.push(format!("systemctl enable --now {}", units.join(" ")));
        all.push("strake wait --healthy".into());
        all
    }
}

/// The port in a storage server's file of this program.
fn port_in(text: &str) -> u16 {
    let of = text.lines().find_map(|l| l.strip_prefix("listen = \"tcp:0.0.0.0:"));
    of.and_then(|rest| rest.trim_end_matches('"').parse().ok()).unwrap_or(OSS_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(etc: &Path, host: &str, target: &[&str]) -> InitArgs {
        InitArgs {
            mds: ["n1:17400", "n2:17400", "n3:17400"].map(String::from).to_vec(),
            host: Some(host.into()),
            target: target.iter().map(|t| t.to_string()).collect(),
            copies: None,
            expect_targets: None,
            rack: Some("r1".into()),
            etc: etc.to_path_buf(),
            metadata: "/var/lib/strake/mds".into(),
            json: false,
        }
    }

    #[test]
    fn files_of_three_hosts_and_of_one_that_only_stores() {
        let dir = tempfile::tempdir().unwrap();
        let first = host(&args(dir.path(), "n1", &["/srv/a=1", "/srv/b=2"])).unwrap();
        assert_eq!((first.id, first.copies, first.expect), (Some(1), 2, 6));
        let files = first.files().unwrap();
        let names: Vec<_> = files.iter().map(|(p, _)| p.file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["admin.toml", "mds-1.toml", "oss-1.toml"]);
        assert!(files[1].1.contains("advertise = \"tcp:n1:17400\"\n"), "{}", files[1].1);
        assert!(files[2].1.contains("size = 2147483648\n") && files[2].1.contains("rack = \"r1\""));
        assert!(first.next().join("\n").contains("scp -p"));
        let full = host(&args(dir.path(), "n2.example.com", &[])).unwrap();
        assert_eq!((full.id, full.name.as_str()), (Some(2), "n2"));
        let stores = host(&args(dir.path(), "n9", &["/srv/a=1"])).unwrap();
        let files = stores.files().unwrap();
        assert_eq!(files[1].0.file_name().unwrap(), "oss-n9.toml");
        assert_eq!(files.len(), 2);
        assert_eq!(stores.next()[0], "systemctl enable --now strake-oss@n9");
    }

    #[test]
    fn it_runs_again_and_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let etc = dir.path().join("etc");
        let a = args(&etc, "n1", &["/srv/a=1"]);
        // Not the first: the key is made elsewhere.
        let e = init(&args(&etc, "n2", &[])).unwrap_err();
        assert!(e.code == Code::NoEnt && e.message.contains("on n1:17400 first"), "{e}");
        fs::remove_dir_all(&etc).unwrap();
        init(&a).unwrap();
        let key = fs::read(etc.join("cluster.key")).unwrap();
        assert_eq!(key.len(), 65);
        init(&a).unwrap();
        assert_eq!(fs::read(etc.join("cluster.key")).unwrap(), key);
        let file = etc.join("mds-1.toml");
        let edited = fs::read_to_string(&file).unwrap() + "# mine\n";
        fs::write(&file, &edited).unwrap();
        let e = init(&a).unwrap_err();
        assert!(e.code == Code::Exist && e.message.contains("mds-1.toml"), "{e}");
        assert_eq!(fs::read_to_string(&file).unwrap(), edited);
    }

    #[test]
    fn ports_do_not_collide() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (TcpListener::bind("0.0.0.0:0").unwrap(), OSS_PORT);
        let taken = one.local_addr().unwrap().port();
        let mut a = args(dir.path(), "n1", &["/srv/a=1"]);
        a.mds[0] = format!("n1:{taken}");
        let e = host(&a).err().unwrap();
        assert!(e.code == Code::Busy && e.message.contains(&taken.to_string()), "{e}");
        // The storage server keeps away from the metadata server's ports.
        a.mds[0] = format!("n1:{two}");
        let h = host(&a).unwrap();
        assert!(h.oss_port > two + 1, "{}", h.oss_port);
    }

    #[test]
    fn mistakes() {
        let dir = tempfile::tempdir().unwrap();
        let bad = |host_name: &str, target: &str| {
            let targets = [target].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>();
            host(&args(dir.path(), host_name, &targets)).err().unwrap()
        };
        assert!(bad("n7", "").message.contains("'n7' is not among n1, n2, n3"));
        assert!(bad("n1", "srv").message.contains("begin with '/'"));
        assert!(bad("n1", "/srv=x").message.contains("not a size in GiB"));
        let e = bad("n1", "/srv=99999999");
        assert!(e.code == Code::NoSpc && e.message.contains("a tenth must stay free"), "{e}");
    }
}
