//! Parses the data of options. Every length is checked against the bytes present.

use super::wire::STRING_BYTES_MAX;

/// What is wrong with an option's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OptionError {
    /// The lengths do not add up.
    Length,
    /// A string is longer than the protocol allows.
    TooBig,
    /// A string is not UTF-8.
    Text,
}

/// The data of `INFO` and `GO`.
#[derive(PartialEq, Eq, Debug)]
pub struct ExportQuery<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The requested information types, as pairs of bytes.
    wanted: &'a [u8],
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(PartialEq, Eq, Debug)]
pub struct ContextQuery<'a> {
    /// The export's name.
    pub name: &'a str,
    /// The number of queries.
    pub queries: u32,
    /// Whether one of them is exactly `base:allocation`.
    pub exact: bool,
    /// Whether one of them is the whole namespace `base:`.
    pub namespace: bool,
}

impl<'a> ExportQuery<'a> {
    /// Parses the data.
    ///
    /// # Errors
    /// The data is not a name, a count and that many numbers.
    pub fn parse(data: &'a [u8]) -> Result<Self, OptionError> {
        let mut rest = data;
        let name = string(&mut rest)?;
        let count = usize::from(u16::from_be_bytes(array(&mut rest)?));
        if rest.len() == count * 2 { Ok(Self { name, wanted: rest }) } else { Err(OptionError::Length) }
    }

    /// Whether the client asked for this type of information.
    #[must_use]
    pub fn wants(&self, info: u16) -> bool {
        self.wanted.chunks_exact(2).any(|pair| pair == info.to_be_bytes())
    }
}

impl<'a> ContextQuery<'a> {
    /// Parses the data.
    ///
    /// # Errors
    /// The data is not a name, a count and that many strings.
    pub fn parse(data: &'a [u8]) -> Result<Self, OptionError> {
        let mut rest = data;
        let name = string(&mut rest)?;
        let queries = u32::from_be_bytes(array(&mut rest)?);
        let mut question = Self { name, queries, exact: false, namespace: false };
        // Each query takes at least four bytes, so the data bounds the loop whatever the count
        // claims.
        for _ in 0..queries {
            let query = string(&mut rest)?;
            question.exact |= query == super::wire::BASE_ALLOCATION;
            question.namespace |= query == "base:";
        }
        if rest.is_empty() { Ok(question) } else { Err(OptionError::Length) }
    }
}

/// Parses a name without a length (`EXPORT_NAME`).
///
/// # Errors
/// The name is too long or not UTF-8.
pub fn name(data: &[u8]) -> Result<&str, OptionError> {
    if data.len() > STRING_BYTES_MAX {
        return Err(OptionError::TooBig);
    }
    str::from_utf8(data).map_err(|_| OptionError::Text)
}

fn string<'a>(rest: &mut &'a [u8]) -> Result<&'a str, OptionError> {
    let length = u32::from_be_bytes(array(rest)?);
    let length = usize::try_from(length).map_err(|_| OptionError::Length)?;
    let (bytes, behind) = rest.split_at_checked(length).ok_or(OptionError::Length)?;
    *rest = behind;
    name(bytes)
}

fn array<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], OptionError> {
    let (bytes, behind) = rest.split_first_chunk::<N>().ok_or(OptionError::Length)?;
    *rest = behind;
    Ok(*bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_name(name: &[u8], tail: &[u8]) -> Vec<u8> {
        let length = u32::try_from(name.len()).unwrap();
        [&length.to_be_bytes()[..], name, tail].concat()
    }

    #[test]
    fn an_export_question_must_add_up() {
        let data = with_name(b"tank", &[0, 2, 0, 3, 0, 1]);
        let question = ExportQuery::parse(&data).unwrap();
        assert_eq!(question.name, "tank");
        assert!(question.wants(3) && question.wants(1) && !question.wants(2));
        for cut in 0..data.len() {
            assert_eq!(ExportQuery::parse(&data[..cut]), Err(OptionError::Length), "{cut}");
        }
        let longer = [&data[..], &[0]].concat();
        assert_eq!(ExportQuery::parse(&longer), Err(OptionError::Length));
        let huge = with_name(&[b'x'; STRING_BYTES_MAX + 1], &[0, 0]);
        assert_eq!(ExportQuery::parse(&huge), Err(OptionError::TooBig));
        assert_eq!(ExportQuery::parse(&with_name(&[0xff], &[0, 0])), Err(OptionError::Text));
    }

    #[test]
    fn a_context_question_must_add_up() {
        let queries =
            [&2u32.to_be_bytes()[..], &with_name(b"base:allocation", &[]), &with_name(b"base:", &[])];
        let data = with_name(b"tank", &queries.concat());
        let question = ContextQuery::parse(&data).unwrap();
        assert_eq!(question, ContextQuery { name: "tank", queries: 2, exact: true, namespace: true });
        for cut in 0..data.len() {
            assert_eq!(ContextQuery::parse(&data[..cut]), Err(OptionError::Length), "{cut}");
        }
        let claims = with_name(b"tank", &u32::MAX.to_be_bytes());
        assert_eq!(ContextQuery::parse(&claims), Err(OptionError::Length));
    }
}
