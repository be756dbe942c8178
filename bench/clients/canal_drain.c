// SPDX-License-Identifier: Apache-2.0
// A minimal Canal client: requests a batch, counts the rows declared by its entries, acknowledges it, and
// requests the next. canal_drain PORT DESTINATION FILTER ROWS prints "rows entries bytes batches seconds".

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FETCH_SIZE 4096

enum {
    HANDSHAKE = 1,
    CLIENTAUTHENTICATION = 2,
    ACK = 3,
    SUBSCRIPTION = 4,
    UNSUBSCRIPTION = 5,
    GET = 6,
    MESSAGES = 7,
    CLIENTACK = 8
};

typedef struct {
    const uint8_t *at, *end;
} Span;

static int peer;
static uint8_t *frame;
static size_t frame_room;
static long long rows, entries, bytes, batches;

static void fail(const char *what) {
    fprintf(stderr, "canal_drain: %s\n", what);
    exit(1);
}

static uint64_t varint(Span *span) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (span->at >= span->end) fail("a varint ends early");
        uint8_t byte = *span->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return value;
    }
    fail("a varint is too long");
    return 0;
}

// Takes the next field: its number, its value if it is a number, its bytes if it has any. 0 at the end.
static int field(Span *span, uint64_t *number, Span *inner) {
    if (span->at >= span->end) return 0;
    uint64_t key = varint(span);
    if ((key & 7) == 0) {
        *number = varint(span);
    } else if ((key & 7) == 2) {
        uint64_t length = varint(span);
        if (length > (uint64_t)(span->end - span->at)) fail("a field ends early");
        inner->at = span->at;
        inner->end = span->at += length;
    } else {
        fail("a field of another kind");
    }
    return (int)(key >> 3);
}

static void read_exactly(uint8_t *into, size_t length) {
    while (length) {
        ssize_t got = recv(peer, into, length, 0);
        if (got <= 0) fail("the server left");
        into += got;
        length -= (size_t)got;
    }
}

static void write_exactly(const uint8_t *from, size_t length) {
    while (length) {
        ssize_t sent = send(peer, from, length, MSG_NOSIGNAL);
        if (sent <= 0) fail("the server left");
        from += sent;
        length -= (size_t)sent;
    }
}

static Span receive(int *type) {
    uint8_t head[4];
    read_exactly(head, 4);
    size_t length = (size_t)head[0] << 24 | (size_t)head[1] << 16 | (size_t)head[2] << 8 | head[3];
    if (length > frame_room) frame = realloc(frame, frame_room = length);
    if (!frame) fail("no memory");
    read_exactly(frame, length);
    bytes += (long long)length + 4;
    Span packet = {frame, frame + length}, body = {0, 0}, inner;
    uint64_t number;
    *type = 0;
    for (int one; (one = field(&packet, &number, &inner));) {
        if (one == 3) *type = (int)number;
        if (one == 5) body = inner;
    }
    return body;
}

static uint8_t *put_varint(uint8_t *out, uint64_t value) {
    for (; value > 127; value >>= 7) *out++ = (uint8_t)(value | 128);
    *out++ = (uint8_t)value;
    return out;
}

static uint8_t *put_text(uint8_t *out, int number, const char *text) {
    out = put_varint(out, (uint64_t)number << 3 | 2);
    out = put_varint(out, strlen(text));
    return (uint8_t *)memcpy(out, text, strlen(text)) + strlen(text);
}

static uint8_t *put_number(uint8_t *out, int number, uint64_t value) {
    return put_varint(put_varint(out, (uint64_t)number << 3), value);
}

static void send_packet(int type, const uint8_t *body, size_t length) {
    uint8_t packet[4096], *out = put_number(packet + 4, 3, (uint64_t)type);
    out = put_varint(put_varint(out, 5 << 3 | 2), length);
    memcpy(out, body, length);
    uint32_t size = htonl((uint32_t)(out + length - packet - 4));
    memcpy(packet, &size, 4);
    write_exactly(packet, (size_t)(out + length - packet));
}

static void expect_ack(void) {
    int type;
    Span body = receive(&type), inner;
    uint64_t number;
    if (type != ACK) fail("no acknowledgement");
    for (int one; (one = field(&body, &number, &inner));)
        if (one == 1 && number) fail("the server refuses");
}

// Adds the row count of an entry: the property rowsCount of its header.
static void count_entry(Span entry) {
    uint64_t number;
    Span inner, pair, text;
    entries++;
    for (int one; (one = field(&entry, &number, &inner));) {
        if (one != 1) continue;
        Span header = inner;
        while ((one = field(&header, &number, &pair))) {
            if (one != 12) continue;
            int wanted = 0;
            while ((one = field(&pair, &number, &text))) {
                if (one == 1) wanted = text.end - text.at == 9 && !memcmp(text.at, "rowsCount", 9);
                if (one == 2 && wanted)
                    for (long long count = 0;; count = count * 10 + *text.at++ - '0')
                        if (text.at == text.end) {
                            rows += count;
                            break;
                        }
            }
        }
        return;
    }
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(int count, char **words) {
    if (count != 5) fail("usage: canal_drain PORT DESTINATION FILTER ROWS");
    const char *destination = words[2], *client = "1001";
    long long wanted = atoll(words[4]);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    peer = socket(AF_INET, SOCK_STREAM, 0);
    int on = 1;
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(peer, (struct sockaddr *)&address, sizeof address)) fail("no connection");

    int type;
    receive(&type);
    if (type != HANDSHAKE) fail("no handshake");
    uint8_t body[1024], *out = put_text(put_text(body, 1, ""), 2, "");
    send_packet(CLIENTAUTHENTICATION, body, (size_t)(out - body));
    expect_ack();
    // Resets the position of an earlier run, so that every run starts at the first row.
    const int begin[] = {SUBSCRIPTION, UNSUBSCRIPTION, SUBSCRIPTION};
    for (int one = 0; one < 3; one++) {
        out = put_text(put_text(put_text(body, 1, destination), 2, client), 7, words[3]);
        send_packet(begin[one], body, (size_t)(out - body));
        expect_ack();
    }

    bytes = 0;
    double begun = seconds();
    while (rows < wanted) {
        // Batch size, the longest wait for a full batch, and its unit: milliseconds.
        out = put_number(put_text(put_text(body, 1, destination), 2, client), 3, FETCH_SIZE);
        out = put_number(put_number(out, 4, 20), 5, 2);
        send_packet(GET, body, (size_t)(out - body));
        Span messages = receive(&type), entry;
        uint64_t number, batch = 0;
        if (type != MESSAGES) fail("no messages");
        for (int one; (one = field(&messages, &number, &entry));) {
            if (one == 1) batch = number;
            if (one == 2) count_entry(entry);
        }
        if ((int64_t)batch <= 0) continue;
        batches++;
        out = put_number(put_text(put_text(body, 1, destination), 2, client), 3, batch);
        send_packet(CLIENTACK, body, (size_t)(out - body));
    }
    printf("%lld %lld %lld %lld %.6f\n", rows, entries, bytes, batches, seconds() - begun);
    return 0;
}
