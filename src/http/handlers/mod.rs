//! From a routed request to an answer: decode, call, encode. Leaves the URL map to `route`, status codes to `reply`,
//! meaning to `session` and `archive`. Rule a change could break: nothing a client sends changes anything before it is
//! checked whole.

mod body;
mod chat;
mod read;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Code, Error, Result};
use crate::http::reply::Reply;
use crate::http::route::Route;
use crate::http::server::{Handler, Incoming};
use crate::ids::SessionId;
use crate::session::engine::Session;
use crate::session::pool::Pool;
use crate::session::registry::Registry;

/// Answers every route that the gate does not answer itself.
pub struct Handlers {
    registry: Arc<Registry>,
    pool: Arc<Pool>,
    going_down: Arc<AtomicBool>,
}

impl Handlers {
    /// Handlers over the registry; `going_down` is set by `app` when no new message is taken.
    #[must_use]
    pub fn new(registry: Arc<Registry>, pool: Arc<Pool>, going_down: Arc<AtomicBool>) -> Self {
        Self { registry, pool, going_down }
    }

    fn session(&self, id: &SessionId) -> Result<Arc<Session>> {
        self.registry.find(id)
    }

    /// New work is refused while the server goes down; reading goes on.
    fn ensure_open(&self) -> Result<()> {
        if self.going_down.load(Ordering::Relaxed) {
            return Err(Error::new(Code::ShuttingDown, "the server is going down, repeat with the same messageId"));
        }
        Ok(())
    }
}

impl Handler for Handlers {
    fn answer(&self, incoming: Incoming) -> Result<Reply> {
        let Incoming { route, body, range, if_none_match, accepts_gzip } = incoming;
        match route {
            Route::Send => self.send(body),
            Route::Interrupt => self.interrupt(&body),
            Route::Stop => self.stop(&body),
            Route::Restart => self.restart(&body),
            Route::Reset => self.reset(&body),
            Route::Retry => self.retry(&body),
            Route::Discard => self.discard(&body),
            Route::SetFeature => self.set_feature(&body),
            Route::GetFeatures { session } => self.features(&session),
            Route::History { session, window } => self.history(&session, window),
            Route::Bootstrap { session, tail } => self.bootstrap(session.as_ref(), tail),
            Route::Sessions => Ok(self.sessions()),
            Route::Status { session } => self.status(&session),
            Route::PendingImage { message, n } => self.pending_image(&message, n),
            Route::Turns { turn, after, wait_ms } => self.turns(&turn, after, wait_ms),
            Route::Media { media, head } => self.media(&media, head, range.as_deref(), if_none_match.as_deref()),
            Route::Asset { path } => read::asset(&path, if_none_match.as_deref(), accepts_gzip),
            Route::ThreadsSend => self.send_to_thread(&body),
            Route::Threads => Ok(self.threads()),
            Route::Events | Route::DebugThreads | Route::Healthz | Route::Readyz | Route::Metrics | Route::Login => {
                Err(Error::internal("the gate answers this route itself"))
            }
        }
    }
}
