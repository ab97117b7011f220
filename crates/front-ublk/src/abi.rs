//! The kernel's ublk interface (`linux/ublk_cmd.h`): its constants and layouts, and conversions to
//! bytes and back.
//!
//! Everything is in native byte order, at the offsets that the header defines.

use rustix::ioctl::{Opcode, opcode};

/// The head of a control command; its size is part of the command's number.
type CommandHead = [u8; 32];

/// A command that only queries: `_IOR('u', ..)`.
const fn asks(number: u8) -> Opcode {
    opcode::read::<CommandHead>(b'u', number)
}

/// A command that changes something: `_IOWR('u', ..)`.
const fn changes(number: u8) -> Opcode {
    opcode::read_write::<CommandHead>(b'u', number)
}

/// The commands to `/dev/ublk-control`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    AddDev,
    DelDev,
    StartDev,
    StopDev,
    SetParams,
    GetDevInfo,
    StartUserRecovery,
    EndUserRecovery,
    GetFeatures,
    UpdateSize,
}

impl Command {
    pub(crate) const fn number(self) -> Opcode {
        match self {
            Self::GetDevInfo => asks(0x02),
            Self::AddDev => changes(0x04),
            Self::DelDev => changes(0x05),
            Self::StartDev => changes(0x06),
            Self::StopDev => changes(0x07),
            Self::SetParams => changes(0x08),
            Self::StartUserRecovery => changes(0x10),
            Self::EndUserRecovery => changes(0x11),
            Self::GetFeatures => asks(0x13),
            Self::UpdateSize => changes(0x15),
        }
    }

    /// What the command does, for messages.
    pub(crate) const fn does(self) -> &'static str {
        match self {
            Self::AddDev => "create a device",
            Self::DelDev => "remove the device",
            Self::StartDev => "start the device",
            Self::StopDev => "stop the device",
            Self::SetParams => "set the device's limits",
            Self::GetDevInfo => "query a device",
            Self::StartUserRecovery => "begin to take the device over",
            Self::EndUserRecovery => "take the device over",
            Self::GetFeatures => "query the features of the driver",
            Self::UpdateSize => "resize the device",
        }
    }
}

/// Feature (`UBLK_F_..`): a device survives the death of its server.
pub(crate) const F_USER_RECOVERY: u64 = 1 << 3;
/// In-flight requests of a dead server are reissued to the next one.
pub(crate) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Commands have ioctl numbers; plain numbers are for old servers.
pub(crate) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// Data is copied by reads and writes of the character device.
pub(crate) const F_USER_COPY: u64 = 1 << 7;
/// The driver registers the memory of requests with a ring automatically.
pub(crate) const F_AUTO_BUF_REG: u64 = 1 << 11;
/// The device can be resized.
pub(crate) const F_UPDATE_SIZE: u64 = 1 << 10;
/// A device can be quiesced.
pub(crate) const F_QUIESCE: u64 = 1 << 12;

/// The state of a device's server, as the driver sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServerState {
    /// The device was not started, or was stopped.
    Dead,
    /// The device is being served.
    Live,
    /// The server is gone, and I/O waits for the next one.
    Quiesced,
    /// The server is gone, and I/O fails.
    FailIo,
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DeviceInfo {
    pub queues: u16,
    pub depth: u16,
    pub state: u16,
    pub max_io_bytes: u32,
    /// The device's number; `u32::MAX` asks for any.
    pub number: u32,
    /// The server's process.
    pub process: i32,
    pub features: u64,
    /// A word that the driver keeps for the server.
    pub identity: u64,
}

/// Size of [`DeviceInfo`] in bytes.
pub(crate) const INFO_BYTES: usize = 64;

impl DeviceInfo {
    pub(crate) fn to_bytes(self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        bytes[0..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.max_io_bytes.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.number.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.process.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.features.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.identity.to_ne_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; INFO_BYTES]) -> Self {
        Self {
            queues: u16::from_ne_bytes(part(bytes, 0)),
            depth: u16::from_ne_bytes(part(bytes, 2)),
            state: u16::from_ne_bytes(part(bytes, 4)),
            max_io_bytes: u32::from_ne_bytes(part(bytes, 8)),
            number: u32::from_ne_bytes(part(bytes, 12)),
            process: i32::from_ne_bytes(part(bytes, 16)),
            features: u64::from_ne_bytes(part(bytes, 24)),
            identity: u64::from_ne_bytes(part(bytes, 32)),
        }
    }

    pub(crate) const fn state(&self) -> ServerState {
        match self.state {
            1 => ServerState::Live,
            2 => ServerState::Quiesced,
            3 => ServerState::FailIo,
            _ => ServerState::Dead,
        }
    }
}

/// The part of `bytes` at `offset`.
fn part<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[offset..offset + N]);
    part
}

/// The properties of a device for the block layer: `struct ublk_params` with its basic and discard
/// parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceParams {
    pub read_only: bool,
    /// Logical and physical block size; a power of two.
    pub block_bytes: u32,
    /// Optimal I/O size in bytes: a power of two, at least a block.
    pub optimal_io_bytes: u32,
    /// Largest request, in sectors.
    pub max_sectors: u32,
    /// Capacity in sectors.
    pub sectors: u64,
    /// Largest discard or zeroing request, in sectors.
    pub max_discard_sectors: u32,
}

/// Size of [`DeviceParams`] in bytes: the head, the basic and the discard part.
pub(crate) const PARAMS_BYTES: usize = 60;

const PARAM_BASIC: u32 = 1;
const PARAM_DISCARD: u32 = 2;
const ATTR_READ_ONLY: u32 = 1;
const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
const ATTR_FUA: u32 = 1 << 3;

impl DeviceParams {
    pub(crate) fn to_bytes(self) -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        let mut put = |offset: usize, value: u32| {
            bytes[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
        };
        put(0, u32::try_from(PARAMS_BYTES).expect("a small constant"));
        put(4, PARAM_BASIC | PARAM_DISCARD);
        let read_only = if self.read_only { ATTR_READ_ONLY } else { 0 };
        put(8, ATTR_VOLATILE_CACHE | ATTR_FUA | read_only);
        put(16, self.max_sectors);
        // Discards: granularity, largest discard, largest zeroing request.
        put(44, self.block_bytes);
        put(48, self.max_discard_sectors);
        put(52, self.max_discard_sectors);
        bytes[24..32].copy_from_slice(&self.sectors.to_ne_bytes());
        // One range for each discard: the driver accepts no more.
        bytes[56..58].copy_from_slice(&1_u16.to_ne_bytes());
        let shift = |bytes: u32| u8::try_from(bytes.trailing_zeros()).expect("at most 32");
        let block = shift(self.block_bytes);
        // Logical, physical, optimal and minimum size. An optimal size of one block tells file
        // systems nothing, which is right.
        bytes[12..16].copy_from_slice(&[block, block, shift(self.optimal_io_bytes), block]);
        bytes
    }
}

/// The operation of a request (`UBLK_IO_OP_..`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IoOperation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    /// An operation of zoned devices, or of a newer kernel.
    Other(u8),
}

impl IoOperation {
    /// Whether it changes the device's content.
    pub(crate) const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes | Self::Other(_))
    }
}

/// `struct ublksrv_io_desc`, as written by the driver for one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct IoDescriptor {
    pub wanted: IoOperation,
    /// Must be durable when it is answered.
    pub fua: bool,
    /// A zeroing request must keep its space allocated.
    pub keeps_space: bool,
    /// Its memory was to be registered, but could not be.
    pub is_unregistered: bool,
    pub sector: u64,
    pub sectors: u32,
}

/// Size of a [`IoDescriptor`] in bytes.
pub(crate) const DESCRIPTION_BYTES: usize = 24;

const IO_F_FUA: u32 = 1 << 13;
const IO_F_NOUNMAP: u32 = 1 << 15;
const IO_F_NEED_REG_BUF: u32 = 1 << 17;

impl IoDescriptor {
    /// Decodes `op_flags`, `nr_sectors` and `start_sector`.
    pub(crate) const fn new(flags: u32, sectors: u32, sector: u64) -> Self {
        let wanted = match flags.to_ne_bytes()[if cfg!(target_endian = "little") { 0 } else { 3 }] {
            0 => IoOperation::Read,
            1 => IoOperation::Write,
            2 => IoOperation::Flush,
            3 => IoOperation::Discard,
            5 => IoOperation::WriteZeroes,
            other => IoOperation::Other(other),
        };
        // The header numbers the flags from bit 8 of the same word.
        let (fua, keeps_space) = (flags & IO_F_FUA != 0, flags & IO_F_NOUNMAP != 0);
        let is_unregistered = flags & IO_F_NEED_REG_BUF != 0;
        Self { wanted, fua, keeps_space, is_unregistered, sector, sectors }
    }
}

/// Distance between the descriptions of two queues in the mapping of the character device: enough
/// for the maximum queue depth, in whole pages.
pub(crate) const QUEUE_STRIDE: u64 = 4096 * DESCRIPTION_BYTES as u64;

/// The offset of a tag's request data in the character device.
pub(crate) const fn data_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + ((queue as u64) << 41) + ((tag as u64) << 25)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_header() {
        assert_eq!(Command::AddDev.number(), 0xc020_7504);
        assert_eq!(Command::GetDevInfo.number(), 0x8020_7502);
        assert_eq!(Command::GetFeatures.number(), 0x8020_7513);
    }

    #[test]
    fn a_device_is_what_was_said_of_it() {
        let info = DeviceInfo {
            queues: 1,
            depth: 128,
            state: 2,
            max_io_bytes: 1 << 20,
            number: 7,
            process: 4711,
            features: F_USER_COPY | F_UPDATE_SIZE,
            identity: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(DeviceInfo::from_bytes(&info.to_bytes()), info);
        assert_eq!(info.state(), ServerState::Quiesced);
    }

    #[test]
    fn what_a_request_wants_is_in_the_low_byte_and_its_flags_above() {
        let forced = IoDescriptor::new(1 | IO_F_FUA, 8, 64);
        assert_eq!((forced.wanted, forced.fua, forced.keeps_space), (IoOperation::Write, true, false));
        let kept = IoDescriptor::new(5 | IO_F_NOUNMAP, 8, 64);
        assert_eq!((kept.wanted, kept.fua, kept.keeps_space), (IoOperation::WriteZeroes, false, true));
        assert_eq!(IoDescriptor::new(18, 0, 0).wanted, IoOperation::Other(18));
    }
}
