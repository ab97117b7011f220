//! A listening socket that survives the removal of its file: a new socket takes its place.

use std::future::poll_fn;
use std::io;
use std::mem;
use std::os::unix::net;
use std::pin::pin;
use std::task::Poll;
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::UnboundedReceiver;

/// A socket, and the channel from which its replacements come.
pub(super) type ReplaceableSocket = (net::UnixListener, UnboundedReceiver<net::UnixListener>);

/// Accepts from the newest socket and from the one before it, so that clients that had connected to
/// the old one are not turned away. Connections outlive the socket that accepted them.
pub(super) struct ReplaceableListener {
    former: Option<UnixListener>,
    now: UnixListener,
    next: UnboundedReceiver<net::UnixListener>,
}

impl ReplaceableListener {
    /// Begins with the socket that exists.
    ///
    /// # Errors
    /// The system can register no more descriptors for polling.
    pub(super) fn new((now, next): ReplaceableSocket) -> io::Result<Self> {
        Ok(Self { former: None, now: UnixListener::from_std(now)?, next })
    }

    /// Waits for a connection or for the next socket.
    async fn either(&mut self) -> Result<(UnixStream, SocketAddr), net::UnixListener> {
        let former = &self.former;
        let mut accepted = pin!(axum::serve::Listener::accept(&mut self.now));
        let mut next = pin!(self.next.recv());
        // The sender is dropped at a stop. A receiver that has reported that must not be polled
        // again.
        let mut is_last = false;
        poll_fn(|context| {
            if !is_last {
                match next.as_mut().poll(context) {
                    Poll::Ready(Some(next)) => return Poll::Ready(Err(next)),
                    Poll::Ready(None) => is_last = true,
                    Poll::Pending => {}
                }
            }
            if let Some(Poll::Ready(Ok(accepted))) = former.as_ref().map(|former| former.poll_accept(context))
            {
                return Poll::Ready(Ok(accepted));
            }
            accepted.as_mut().poll(context).map(Ok)
        })
        .await
    }
}

impl axum::serve::Listener for ReplaceableListener {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            match self.either().await {
                Ok(accepted) => return accepted,
                Err(next) => match UnixListener::from_std(next) {
                    Ok(next) => self.former = Some(mem::replace(&mut self.now, next)),
                    Err(error) => tracing::error!(
                        event = "control-failed",
                        "cannot use a socket that was bound again: {error}"
                    ),
                },
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.now.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::serve::Listener as _;
    use std::os::unix::net::UnixStream as Client;
    use std::time::Duration;
    use tokio::sync::mpsc::unbounded_channel;

    #[test]
    fn another_socket_takes_the_place_of_one_whose_file_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let bind = || {
            let listener = net::UnixListener::bind(&path).unwrap();
            listener.set_nonblocking(true).unwrap();
            listener
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (again, next) = unbounded_channel();
            let mut lasting = ReplaceableListener::new((bind(), next)).unwrap();
            let _first = Client::connect(&path).unwrap();
            let (first, _) = lasting.accept().await;
            // Two more clients connect to this socket, and one to the next, before any is accepted.
            let mut waiting = vec![Client::connect(&path).unwrap(), Client::connect(&path).unwrap()];
            std::fs::remove_file(&path).unwrap();
            again.send(bind()).unwrap();
            waiting.push(Client::connect(&path).unwrap());
            for _ in &waiting {
                let accepted = tokio::time::timeout(Duration::from_secs(60), lasting.accept());
                accepted.await.expect("nobody is turned away");
            }
            assert!(first.peer_cred().is_ok(), "the first connection goes on");
            // The sender of new sockets is dropped; the socket keeps being served.
            drop(again);
            // `accept` already waits when the third client connects.
            let third = path.clone();
            let third = tokio::spawn(async move { Client::connect(third) });
            let _accepted = lasting.accept().await;
            assert!(third.await.unwrap().is_ok());
        });
    }
}
