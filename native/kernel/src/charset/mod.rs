//! The character sets of MySQL and MariaDB, exactly as the servers convert them.
//!
//! Text is decoded to UTF-8. The mappings were queried from MySQL 9, code by code; MariaDB 11.8 has the same mappings
//! (`tools/charsets.py`). A character that a server shows as `?`, because Unicode does not have it, is invalid text
//! here, so that no value is silently replaced.

mod collations;
mod layout;
mod pages;
mod sets;
mod tables;
#[cfg(test)]
mod tests;
mod unicode;
mod writer;

pub use sets::{Charset, InvalidText};

impl Charset {
    /// Find the character set of a collation id of MySQL 9 or MariaDB 11.8, whose ids do not clash.
    pub fn from_collation_id(id: u32) -> Option<Charset> {
        let after = collations::COLLATIONS.partition_point(|&(first, _, _)| first <= id);
        let &(_, last, charset) = collations::COLLATIONS.get(after.checked_sub(1)?)?;
        (id <= last).then_some(charset)
    }

    /// Append `bytes` to `out` as UTF-8.
    ///
    /// The charset `binary` has no characters. Its bytes are decoded as utf8mb4, which is how the server converts them.
    ///
    /// # Errors
    /// `InvalidText` at the first sequence that is not a character; then `out` is unchanged.
    pub fn decode_into(self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
        let length = out.len();
        let decoded = self.append(bytes, out);
        if decoded.is_err() {
            out.truncate(length);
        }
        decoded
    }

    /// Append `bytes` to `out` as UTF-8. After an error, the text before it stays in `out`.
    fn append(self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), InvalidText> {
        use pages::{decode_multibyte, decode_single_byte};
        match self {
            Charset::Utf8mb4 | Charset::Binary => unicode::decode_utf8mb4(bytes, out),
            Charset::Utf8mb3 => unicode::decode_utf8mb3(bytes, out),
            Charset::Ascii => unicode::decode_ascii(bytes, out),
            Charset::Ucs2 => unicode::decode_utf16(bytes, u16::from_be_bytes, false, out),
            Charset::Utf16 => unicode::decode_utf16(bytes, u16::from_be_bytes, true, out),
            Charset::Utf16le => unicode::decode_utf16(bytes, u16::from_le_bytes, true, out),
            Charset::Utf32 => unicode::decode_utf32(bytes, out),
            Charset::Armscii8 => decode_single_byte(tables::ARMSCII8, bytes, out),
            Charset::Cp1250 => decode_single_byte(tables::CP1250, bytes, out),
            Charset::Cp1251 => decode_single_byte(tables::CP1251, bytes, out),
            Charset::Cp1256 => decode_single_byte(tables::CP1256, bytes, out),
            Charset::Cp1257 => decode_single_byte(tables::CP1257, bytes, out),
            Charset::Cp850 => decode_single_byte(tables::CP850, bytes, out),
            Charset::Cp852 => decode_single_byte(tables::CP852, bytes, out),
            Charset::Cp866 => decode_single_byte(tables::CP866, bytes, out),
            Charset::Dec8 => decode_single_byte(tables::DEC8, bytes, out),
            Charset::Geostd8 => decode_single_byte(tables::GEOSTD8, bytes, out),
            Charset::Greek => decode_single_byte(tables::GREEK, bytes, out),
            Charset::Hebrew => decode_single_byte(tables::HEBREW, bytes, out),
            Charset::Hp8 => decode_single_byte(tables::HP8, bytes, out),
            Charset::Keybcs2 => decode_single_byte(tables::KEYBCS2, bytes, out),
            Charset::Koi8r => decode_single_byte(tables::KOI8R, bytes, out),
            Charset::Koi8u => decode_single_byte(tables::KOI8U, bytes, out),
            Charset::Latin1 => decode_single_byte(tables::LATIN1, bytes, out),
            Charset::Latin2 => decode_single_byte(tables::LATIN2, bytes, out),
            Charset::Latin5 => decode_single_byte(tables::LATIN5, bytes, out),
            Charset::Latin7 => decode_single_byte(tables::LATIN7, bytes, out),
            Charset::Macce => decode_single_byte(tables::MACCE, bytes, out),
            Charset::Macroman => decode_single_byte(tables::MACROMAN, bytes, out),
            Charset::Swe7 => decode_single_byte(tables::SWE7, bytes, out),
            Charset::Tis620 => decode_single_byte(tables::TIS620, bytes, out),
            Charset::Big5 => decode_multibyte(tables::BIG5, bytes, out),
            Charset::Cp932 => decode_multibyte(tables::CP932, bytes, out),
            Charset::Eucjpms => decode_multibyte(tables::EUCJPMS, bytes, out),
            Charset::Euckr => decode_multibyte(tables::EUCKR, bytes, out),
            Charset::Gb18030 => decode_multibyte(tables::GB18030, bytes, out),
            Charset::Gb2312 => decode_multibyte(tables::GB2312, bytes, out),
            Charset::Gbk => decode_multibyte(tables::GBK, bytes, out),
            Charset::Sjis => decode_multibyte(tables::SJIS, bytes, out),
            Charset::Ujis => decode_multibyte(tables::UJIS, bytes, out),
        }
    }
}
