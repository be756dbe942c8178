//! The headers and trailers of gRPC's answers.

use http::header::{HeaderMap, HeaderName, HeaderValue, CONTENT_TYPE};

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPTED: HeaderName = HeaderName::from_static("grpc-accept-encoding");

/// The code of success.
pub const OK: u32 = 0;
/// The code for a message over the limit.
pub const RESOURCE_EXHAUSTED: u32 = 8;
/// The code for a method or an encoding that is not served.
pub const UNIMPLEMENTED: u32 = 12;
/// The code for a call that violates gRPC's protocol.
pub const INTERNAL: u32 = 13;

/// Returns the headers that begin an answer. With `gzip`, its messages may be compressed.
pub fn headers(gzip: bool) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(3);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(ACCEPTED, HeaderValue::from_static("identity,gzip"));
    if gzip {
        headers.insert(ENCODING, HeaderValue::from_static("gzip"));
    }
    headers
}

/// Adds the status of a call to the headers that end its answer.
pub fn add(headers: &mut HeaderMap, code: u32, text: &str) {
    headers.insert(STATUS, HeaderValue::from(code));
    if !text.is_empty() {
        // Percent-encoded text is always a valid header value.
        if let Ok(value) = HeaderValue::from_str(&percent_encoded(text)) {
            headers.insert(MESSAGE, value);
        }
    }
}

/// Returns whether a client's headers name gzip among the encodings that it accepts.
pub fn accepts_gzip(headers: &HeaderMap) -> bool {
    let names =
        |value: &HeaderValue| value.to_str().is_ok_and(|text| text.split(',').any(|name| name.trim() == "gzip"));
    headers.get_all(ACCEPTED).iter().any(names)
}

/// Returns whether a client's headers are those of a gRPC call.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// Returns whether compressed messages of a call can be read.
pub fn is_readable(headers: &HeaderMap) -> bool {
    headers.get(ENCODING).is_none_or(|value| matches!(value.as_bytes(), b"gzip" | b"identity"))
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_any_kind_becomes_a_header() {
        let mut trailers = HeaderMap::new();
        add(&mut trailers, 14, "100 %\nüber");
        assert_eq!(trailers[&STATUS], "14");
        assert_eq!(trailers[&MESSAGE], "100 %25%0A%C3%BCber");
    }

    #[test]
    fn gzip_is_found_among_accepted_encodings() {
        let mut headers = HeaderMap::new();
        assert!(!accepts_gzip(&headers));
        headers.insert(ACCEPTED, HeaderValue::from_static("identity, deflate, gzip"));
        assert!(accepts_gzip(&headers));
        headers.insert(ACCEPTED, HeaderValue::from_static("gzipped"));
        assert!(!accepts_gzip(&headers));
    }
}
