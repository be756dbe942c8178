//! One connection: the calls that have arrived, and the bytes to send.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use h2::server::{Builder, Connection as Http2, Handshake, SendResponse};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Response, StatusCode};

use super::authority::AuthorityFilter;
use super::memory::Memory;
use super::status;
use crate::limits::{GRPC_HEADERS_BYTES_MAX, GRPC_PREFIX_BYTES, GRPC_WINDOW_BYTES};

/// A call that has arrived completely. The number of its stream identifies it in answers.
#[derive(Debug)]
pub struct Call {
    /// The number of the call's stream.
    pub stream: u32,
    /// The path of the called method, such as `/binlog.Pump/WriteBinlog`.
    pub method: String,
    /// The message as it was sent.
    pub message: Vec<u8>,
    /// Whether the message is compressed with gzip.
    pub is_compressed: bool,
    /// Whether the client accepts messages that are compressed with gzip.
    pub accepts_gzip: bool,
}

/// Events of a connection's calls, in the order of their streams.
#[derive(Debug, Default)]
pub struct Progress {
    /// Calls that have arrived.
    pub calls: Vec<Call>,
    /// Calls that ended before they were answered, because the client cancelled them or the connection closed.
    pub cancelled: Vec<u32>,
    /// Calls whose queued messages were all passed to the transport.
    pub sent: Vec<u32>,
}

/// A call whose end has not arrived.
#[derive(Debug)]
struct ArrivingCall {
    method: String,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    /// Whether the message is compressed, and its length.
    prefix: Vec<u8>,
    message: Vec<u8>,
    accepts_gzip: bool,
}

/// A call that is being answered.
#[derive(Debug)]
struct OpenCall {
    respond: SendResponse<Bytes>,
    /// The messages of the answer; None until the answer has begun.
    answer: Option<SendStream<Bytes>>,
    unsent: VecDeque<Bytes>,
    /// The trailers, set once the answer is complete.
    end: Option<HeaderMap>,
}

#[derive(Debug)]
enum State {
    Opening(Pin<Box<Handshake<Memory, Bytes>>>),
    Open(Box<Http2<Memory, Bytes>>),
    Closed,
}

/// A gRPC connection. After calling any method, the owner takes the progress and sends the output.
#[derive(Debug)]
pub struct Connection {
    memory: Memory,
    /// Rewrites requests without their authority; None for clients that send a valid authority.
    filter: Option<AuthorityFilter>,
    state: State,
    message_bytes_max: usize,
    arriving: BTreeMap<u32, ArrivingCall>,
    open: HashMap<u32, OpenCall>,
    unfinished_bytes: usize,
    progress: Progress,
}

impl Connection {
    /// Begins a connection.
    ///
    /// The client must send its preface first. At most `calls_max` concurrent calls are accepted. Set `any_authority`
    /// for clients of a Unix socket, because they do not send a valid server name.
    pub fn new(calls_max: u32, message_bytes_max: usize, any_authority: bool) -> Connection {
        let memory = Memory::default();
        let handshake = Builder::new()
            .initial_window_size(GRPC_WINDOW_BYTES)
            .initial_connection_window_size(4 * GRPC_WINDOW_BYTES)
            .max_concurrent_streams(calls_max)
            .max_header_list_size(GRPC_HEADERS_BYTES_MAX)
            .handshake(memory.clone());
        Connection {
            memory,
            filter: any_authority.then(|| AuthorityFilter::new(GRPC_HEADERS_BYTES_MAX)),
            state: State::Opening(Box::pin(handshake)),
            message_bytes_max,
            arriving: BTreeMap::new(),
            open: HashMap::new(),
            unfinished_bytes: 0,
            progress: Progress::default(),
        }
    }

    /// Reads received bytes. A violation of the protocol closes the connection.
    pub fn receive(&mut self, bytes: &[u8]) {
        match &mut self.filter {
            None => self.memory.receive(bytes),
            Some(filter) => match filter.pass_on(bytes) {
                Some(frames) => self.memory.receive(&frames),
                None => self.state = State::Closed,
            },
        }
        self.advance();
        self.collect_cancelled();
    }

    /// Ends calls successfully, all with the same message. Cancelled calls are skipped.
    pub fn answer(&mut self, streams: &[u32], message: &[u8]) {
        let (framed, headers, trailers) = (prefixed(message, false), status::headers(false), trailers(status::OK, ""));
        for stream in streams {
            let Some(mut call) = self.open.remove(stream) else { continue };
            let mut head = Response::new(());
            *head.headers_mut() = headers.clone();
            // An error only means that the client has closed the stream.
            let Ok(mut answer) = call.respond.send_response(head, false) else { continue };
            let _ = answer.send_data(framed.clone(), false).and_then(|()| answer.send_trailers(trailers.clone()));
        }
        self.advance();
    }

    /// Adds messages to the answer of a call.
    ///
    /// Once all of them fit into the client's window, the call is added to `Progress::sent`. With `gzip`, all messages
    /// of the answer are compressed.
    pub fn send(&mut self, stream: u32, messages: &[&[u8]], gzip: bool) {
        if let Some(call) = self.open.get_mut(&stream) {
            if call.answer.is_none() {
                let mut head = Response::new(());
                *head.headers_mut() = status::headers(gzip);
                call.answer = call.respond.send_response(head, false).ok();
            }
            call.unsent.extend(messages.iter().map(|message| prefixed(message, gzip)));
        }
        self.advance();
    }

    /// Ends a call with a status, after its messages.
    pub fn finish(&mut self, stream: u32, code: u32, text: &str) {
        if let Some(call) = self.open.get_mut(&stream) {
            if call.answer.is_some() {
                call.end = Some(trailers(code, text));
            } else if let Some(mut call) = self.open.remove(&stream) {
                refuse(&mut call.respond, code, text);
            }
        }
        self.advance();
    }

    /// Tells the client not to send more calls over this connection. The connection closes once the calls that the
    /// client has already sent have ended.
    pub fn end(&mut self) {
        if let State::Open(http) = &mut self.state {
            http.graceful_shutdown();
        }
        self.advance();
    }

    /// Returns and clears the progress since the previous `take_progress`.
    pub fn take_progress(&mut self) -> Progress {
        std::mem::take(&mut self.progress)
    }

    /// Takes the bytes to send.
    pub fn take_output(&mut self) -> Vec<u8> {
        self.memory.take_output()
    }

    /// Number of bytes buffered for calls that have not arrived completely.
    pub fn unfinished_bytes(&self) -> usize {
        self.unfinished_bytes
    }

    /// The number of calls that have not ended.
    pub fn calls(&self) -> usize {
        self.arriving.len() + self.open.len()
    }

    /// Whether nothing more is sent or received.
    pub fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    // --- Inside -----------------------------------------------------------------------------

    /// Reads and writes as much as the received bytes and the current windows allow.
    fn advance(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        if let State::Opening(handshake) = &mut self.state {
            match handshake.as_mut().poll(&mut context) {
                Poll::Ready(Ok(http)) => self.state = State::Open(Box::new(http)),
                Poll::Ready(Err(_)) => self.state = State::Closed,
                Poll::Pending => return,
            }
        }
        loop {
            let accepted = match &mut self.state {
                State::Open(http) => http.poll_accept(&mut context),
                State::Opening(_) | State::Closed => return,
            };
            match accepted {
                Poll::Ready(Some(Ok((request, respond)))) => self.begin(request.into_parts(), respond),
                Poll::Ready(Some(Err(_)) | None) => self.state = State::Closed,
                // Reading opens windows and queues data to write, so both require another round.
                Poll::Pending if self.read_messages(&mut context) | self.write_messages() => {}
                Poll::Pending => return,
            }
        }
    }

    fn begin(&mut self, (head, body): (http::request::Parts, RecvStream), mut respond: SendResponse<Bytes>) {
        if !status::is_grpc(&head.headers) {
            let mut response = Response::new(());
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            // An error means that the client has closed the stream.
            let _ = respond.send_response(response, true);
            return;
        }
        if !status::is_readable(&head.headers) {
            refuse(&mut respond, status::UNIMPLEMENTED, "the encoding of the message is not supported");
            return;
        }
        let call = ArrivingCall {
            method: head.uri.path().to_owned(),
            accepts_gzip: status::accepts_gzip(&head.headers),
            body,
            respond,
            prefix: Vec::with_capacity(GRPC_PREFIX_BYTES),
            message: Vec::new(),
        };
        self.arriving.insert(call.body.stream_id().as_u32(), call);
    }

    /// Reads the messages of arriving calls. Returns whether anything changed.
    fn read_messages(&mut self, context: &mut Context<'_>) -> bool {
        let mut changed = false;
        let mut ended = Vec::new();
        for (stream, call) in &mut self.arriving {
            let before = call.message.len();
            let end = call.read(self.message_bytes_max, context);
            self.unfinished_bytes += call.message.len() - before;
            changed |= call.message.len() > before || end.is_some();
            ended.extend(end.map(|end| (*stream, end)));
        }
        for (stream, end) in ended {
            let Some(mut call) = self.arriving.remove(&stream) else { continue };
            self.unfinished_bytes -= call.message.len();
            match end {
                End::Whole => self.open_call(stream, call),
                End::Invalid(code, text) => refuse(&mut call.respond, code, text),
                End::Cancelled => {}
            }
        }
        changed
    }

    fn open_call(&mut self, stream: u32, call: ArrivingCall) {
        let is_compressed = call.prefix.first() == Some(&1);
        let ArrivingCall { method, message, accepts_gzip, respond, .. } = call;
        self.progress.calls.push(Call { stream, method, message, is_compressed, accepts_gzip });
        self.open.insert(stream, OpenCall { respond, answer: None, unsent: VecDeque::new(), end: None });
    }

    /// Passes messages on, as far as the client's windows allow. Returns whether anything changed.
    fn write_messages(&mut self) -> bool {
        let mut changed = false;
        let progress = &mut self.progress;
        self.open.retain(|stream, call| {
            let Some(answer) = &mut call.answer else { return true };
            let had_unsent = !call.unsent.is_empty();
            while let Some(message) = call.unsent.front_mut() {
                answer.reserve_capacity(message.len());
                let size = answer.capacity().min(message.len());
                if size == 0 {
                    return true;
                }
                changed = true;
                if answer.send_data(message.split_to(size), false).is_err() {
                    // The stream was reset, which `collect_cancelled` reports.
                    call.unsent.clear();
                } else if message.is_empty() {
                    call.unsent.pop_front();
                }
            }
            if had_unsent {
                progress.sent.push(*stream);
            }
            let Some(end) = call.end.take() else { return true };
            changed = true;
            let _ = answer.send_trailers(end);
            false
        });
        changed
    }

    fn collect_cancelled(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        let is_closed = self.is_closed();
        if is_closed {
            self.arriving.clear();
            self.unfinished_bytes = 0;
        }
        let progress = &mut self.progress;
        self.open.retain(|stream, call| {
            let reset = match &mut call.answer {
                Some(answer) => answer.poll_reset(&mut context),
                None => call.respond.poll_reset(&mut context),
            };
            let is_open = !is_closed && reset.is_pending();
            if !is_open {
                progress.cancelled.push(*stream);
            }
            is_open
        });
    }
}

const NOT_ONE_MESSAGE: &str = "the call is not one message";

/// How a call stopped arriving.
enum End {
    Whole,
    Invalid(u32, &'static str),
    Cancelled,
}

impl ArrivingCall {
    /// Reads the bytes that have arrived. Returns None if more are expected.
    fn read(&mut self, message_bytes_max: usize, context: &mut Context<'_>) -> Option<End> {
        loop {
            match self.body.poll_data(context) {
                Poll::Pending => return None,
                Poll::Ready(Some(Err(_))) => return Some(End::Cancelled),
                Poll::Ready(None) if self.length() == Some(self.message.len()) => return Some(End::Whole),
                Poll::Ready(None) => return Some(End::Invalid(status::INTERNAL, NOT_ONE_MESSAGE)),
                Poll::Ready(Some(Ok(part))) => {
                    self.add(&part);
                    // An error means that the stream is closed, which is handled below.
                    let _ = self.body.flow_control().release_capacity(part.len());
                }
            }
            let length = self.length().unwrap_or_default();
            if length > message_bytes_max {
                return Some(End::Invalid(status::RESOURCE_EXHAUSTED, "the message is too large"));
            }
            if self.message.len() > length {
                return Some(End::Invalid(status::INTERNAL, NOT_ONE_MESSAGE));
            }
        }
    }

    fn add(&mut self, part: &[u8]) {
        let (prefix, message) = part.split_at(part.len().min(GRPC_PREFIX_BYTES - self.prefix.len()));
        self.prefix.extend_from_slice(prefix);
        self.message.extend_from_slice(message);
    }

    /// The length of the message, from its prefix; None before the prefix has arrived.
    fn length(&self) -> Option<usize> {
        let [_, length @ ..] = self.prefix.first_chunk::<GRPC_PREFIX_BYTES>()?;
        usize::try_from(u32::from_be_bytes(*length)).ok()
    }
}

fn refuse(respond: &mut SendResponse<Bytes>, code: u32, text: &str) {
    let mut response = Response::new(());
    *response.headers_mut() = status::headers(false);
    status::add(response.headers_mut(), code, text);
    // An error means that the client has closed the stream.
    let _ = respond.send_response(response, true);
}

fn trailers(code: u32, text: &str) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    status::add(&mut trailers, code, text);
    trailers
}

fn prefixed(message: &[u8], is_compressed: bool) -> Bytes {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut framed = Vec::with_capacity(GRPC_PREFIX_BYTES + message.len());
    framed.push(u8::from(is_compressed));
    framed.extend_from_slice(&length.to_be_bytes());
    framed.extend_from_slice(message);
    framed.into()
}

#[cfg(test)]
mod tests;
