//! Connects an `h2` client to the connection through memory.

use h2::client::{self, ResponseFuture, SendRequest};
use h2::Reason;
use http::Request;

use super::*;

/// A client, and the connection that it talks to.
struct Pair {
    memory: Memory,
    http: client::Connection<Memory, Bytes>,
    requests: SendRequest<Bytes>,
    server: Connection,
    progress: Progress,
}

fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

fn ready<T>(poll: Poll<T>) -> T {
    match poll {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("nothing has arrived"),
    }
}

impl Pair {
    fn new() -> Pair {
        Pair::with(Connection::new(4, 1 << 20, false))
    }

    fn with(server: Connection) -> Pair {
        let memory = Memory::default();
        let mut builder = client::Builder::new();
        let mut opening = Box::pin(builder.initial_window_size(100_000).handshake(memory.clone()));
        let (requests, http) = ready(opening.as_mut().poll(&mut context())).unwrap();
        let mut pair = Pair { memory, http, requests, server, progress: Progress::default() };
        pair.exchange();
        pair
    }

    /// Passes bytes in both directions until there are none. Returns whether the client's connection has ended.
    fn exchange(&mut self) -> bool {
        let mut is_over = false;
        loop {
            is_over |= Pin::new(&mut self.http).poll(&mut context()).is_ready();
            let (sent, answered) = (self.memory.take_output(), self.server.take_output());
            if sent.is_empty() && answered.is_empty() {
                return is_over;
            }
            // Deliver the bytes in parts that may end anywhere.
            sent.chunks(7).for_each(|part| self.server.receive(part));
            self.memory.receive(&answered);
            let more = self.server.take_progress();
            self.progress.calls.extend(more.calls);
            self.progress.cancelled.extend(more.cancelled);
            self.progress.sent.extend(more.sent);
        }
    }

    fn call(&mut self, parts: &[&[u8]], ends: bool) -> (ResponseFuture, SendStream<Bytes>) {
        let request = Request::post("http://pump/binlog.Pump/WriteBinlog").header("content-type", "application/grpc");
        ready(self.requests.poll_ready(&mut context())).unwrap();
        let (response, mut body) = self.requests.send_request(request.body(()).unwrap(), false).unwrap();
        for part in parts {
            body.send_data(Bytes::copy_from_slice(part), false).unwrap();
        }
        if ends {
            body.send_data(Bytes::new(), true).unwrap();
        }
        self.exchange();
        (response, body)
    }

    /// Returns the body and the status of an answer.
    fn answer_to(&mut self, mut response: ResponseFuture) -> (Vec<u8>, String) {
        let response = ready(Pin::new(&mut response).poll(&mut context())).unwrap();
        let (head, mut body) = response.into_parts();
        if let Some(code) = head.headers.get("grpc-status") {
            return (Vec::new(), code.to_str().unwrap().to_owned());
        }
        let mut content = Vec::new();
        loop {
            match body.poll_data(&mut context()) {
                Poll::Ready(Some(part)) => {
                    let part = part.unwrap();
                    body.flow_control().release_capacity(part.len()).unwrap();
                    content.extend_from_slice(&part);
                }
                Poll::Ready(None) => break,
                Poll::Pending => {
                    self.exchange();
                }
            }
        }
        let trailers = ready(body.poll_trailers(&mut context())).unwrap().unwrap();
        (content, trailers["grpc-status"].to_str().unwrap().to_owned())
    }
}

#[test]
fn a_call_arrives_whole_and_is_answered() {
    let mut pair = Pair::new();
    let (response, _) = pair.call(&[b"\0\0\0\0\x03a", b"bc"], true);
    let call = pair.progress.calls.pop().unwrap();
    assert_eq!((call.method.as_str(), &call.message[..]), ("/binlog.Pump/WriteBinlog", &b"abc"[..]));
    assert!(!call.is_compressed && !call.accepts_gzip);
    assert_eq!((pair.server.calls(), pair.server.unfinished_bytes()), (1, 0));
    pair.server.answer(&[call.stream, 99], b"ok");
    pair.exchange();
    assert_eq!(pair.answer_to(response), (b"\0\0\0\0\x02ok".to_vec(), "0".to_owned()));
    assert_eq!(pair.server.calls(), 0);
}

#[test]
fn a_call_without_its_authority_is_the_same() {
    let mut pair = Pair::with(Connection::new(4, 1 << 20, true));
    let large = [&b"\0\0\x01\x86\xa0"[..], &[5; 100_000]].concat();
    let (response, _) = pair.call(&[&large], true);
    let call = pair.progress.calls.pop().unwrap();
    assert_eq!((call.method.as_str(), &call.message[..]), ("/binlog.Pump/WriteBinlog", &large[5..]));
    pair.server.answer(&[call.stream], b"ok");
    pair.exchange();
    assert_eq!(pair.answer_to(response).1, "0");
    // A PRIORITY frame, and a frame of an unknown type.
    pair.server.receive(&[0, 0, 5, 2, 0, 0, 0, 0, 9, 0, 0, 0, 0, 7]);
    pair.server.receive(&[0, 0, 1, 99, 0, 0, 0, 0, 0, 7]);
    assert!(!pair.server.is_closed());
    pair.server.receive(&[0xff; 99]);
    assert!(pair.server.is_closed());
}

#[test]
fn bytes_of_calls_without_their_end_are_counted() {
    let mut pair = Pair::new();
    let (_first, mut body) = pair.call(&[b"\0\0\0\x01\0", &[7; 70]], false);
    let (_second, mut other) = pair.call(&[b"\0\0\0\0\x20", &[7; 30]], false);
    assert_eq!((pair.server.unfinished_bytes(), pair.server.calls()), (100, 2));
    body.send_reset(Reason::CANCEL);
    pair.exchange();
    assert_eq!((pair.server.unfinished_bytes(), pair.server.calls()), (30, 1));
    other.send_data(Bytes::from_static(b"xy"), true).unwrap();
    pair.exchange();
    assert_eq!(pair.server.unfinished_bytes(), 0);
    assert_eq!(pair.progress.calls.len(), 1);
}

#[test]
fn calls_that_are_not_one_message_of_a_bounded_size_are_refused() {
    let mut pair = Pair::new();
    for (parts, code) in [
        (&[&b"\0\0\0\0\x03abcd"[..]][..], "13"),
        (&[b"\0\0\0\0\x03ab"], "13"),
        (&[b"\0\0"], "13"),
        (&[], "13"),
        (&[b"\0\0\x10\0\x01"], "8"),
    ] {
        let (response, _) = pair.call(parts, true);
        assert_eq!(pair.answer_to(response).1, code, "{parts:?}");
    }
    assert_eq!((pair.server.unfinished_bytes(), pair.server.calls(), pair.progress.calls.len()), (0, 0, 0));
}

#[test]
fn messages_wait_for_the_window_of_the_client_and_precede_the_status() {
    let mut pair = Pair::new();
    let (response, _) = pair.call(&[b"\0\0\0\0\0"], true);
    let stream = pair.progress.calls[0].stream;
    pair.server.send(stream, &[&[1; 150_000], &[2; 10]], false);
    pair.server.finish(stream, 14, "the Pump is ending");
    pair.exchange();
    assert!(pair.progress.sent.is_empty());
    let (content, code) = pair.answer_to(response);
    assert_eq!((content.len(), code.as_str()), (150_020, "14"));
    assert_eq!(pair.progress.sent, [stream]);
}

#[test]
fn a_client_that_gives_up_is_reported() {
    let mut pair = Pair::new();
    let (_response, mut body) = pair.call(&[b"\0\0\0\0\0"], true);
    let stream = pair.progress.calls[0].stream;
    body.send_reset(Reason::CANCEL);
    pair.exchange();
    assert_eq!((&pair.progress.cancelled[..], pair.server.calls()), (&[stream][..], 0));
    pair.server.answer(&[stream], b"");
    pair.server.finish(stream, 14, "");
    pair.server.send(stream, &[b"late"], false);
}

#[test]
fn an_ended_connection_answers_what_it_has_and_closes() {
    let mut pair = Pair::new();
    let (response, _) = pair.call(&[b"\0\0\0\0\0"], true);
    pair.server.end();
    assert!(!pair.exchange());
    assert!(!pair.server.is_closed());
    pair.server.answer(&[pair.progress.calls[0].stream], b"");
    pair.exchange();
    assert_eq!(pair.answer_to(response).1, "0");
    assert!(pair.server.is_closed());
}

#[test]
fn a_violation_of_the_protocol_closes_the_connection_and_ends_its_calls() {
    let mut pair = Pair::new();
    let _call = pair.call(&[b"\0\0\0\0\0"], true);
    pair.server.receive(&[0xff; 99]);
    assert!(pair.server.is_closed());
    assert_eq!((pair.server.take_progress().cancelled.len(), pair.server.calls()), (1, 0));
}

#[test]
fn no_more_calls_run_at_once_than_allowed() {
    let mut pair = Pair::new();
    let calls: Vec<_> = (0..4).map(|_| pair.call(&[b"\0\0\0\0\0"], true)).collect();
    assert_eq!(pair.server.calls(), calls.len());
    assert!(pair.requests.poll_ready(&mut context()).is_pending() || pair.requests.current_max_send_streams() == 4);
}
