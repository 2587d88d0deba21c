//! The end of a mount.

use std::time::Duration;

use strake_fuse::Mount;

/// Unmounts, and waits until nothing uses the mount any more: the kernel releases closed files a
/// little later.
pub async fn unmounted(m: &Mount) {
    let ending = async {
        while let Err(e) = m.unmount().await {
            assert_eq!(e.code, strake_proto::Code::Busy, "{e}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ending).await.expect("still in use");
}
