// The chats that this browser keeps: an IndexedDB with a record for each chat, each message, and
// the files of each message that is being written.
// Where there is none (a private window, a full disk), they last as long as the page.

import * as tabs from "./tabs.js";

const NAME = "weft";
const VERSION = 1;

let complain = () => {};
let news = () => {};

// `complaint(words)` is called when something cannot be kept, `changed(id)` when another tab has changed a chat.
export function watch(complaint, changed) {
	complain = complaint;
	news = changed;
}

tabs.on("changed", (id) => news(id));

const done = (request) => new Promise((resolve, reject) => {
	request.onsuccess = () => resolve(request.result);
	request.onerror = () => reject(request.error);
});

function disk(database) {
	const of = (table) => database.transaction(table).objectStore(table);
	const change = (table, act) => new Promise((resolve, reject) => {
		const changing = database.transaction(table, "readwrite");
		changing.oncomplete = resolve;
		changing.onabort = () => reject(changing.error);
		act(changing.objectStore(table));
	});
	return {
		all: (table) => done(of(table).getAll()),
		get: (table, id) => done(of(table).get(id)),
		put: (table, record) => change(table, (to) => to.put(record)),
		remove: (table, id) => change(table, (to) => to.delete(id)),
		ofChat: (chat) => done(of("nodes").index("chat").getAll(chat)),
		async each(act) {
			const request = of("nodes").openCursor();
			for (;;) {
				const cursor = await done(request);
				if (!cursor) return;
				act(cursor.value);
				cursor.continue();
			}
		},
	};
}

function memory() {
	const tables = { chats: new Map(), nodes: new Map(), drafts: new Map() };
	return {
		all: async (table) => [...tables[table].values()],
		get: async (table, id) => tables[table].get(id),
		put: async (table, record) => tables[table].set(record.id, structuredClone(record)),
		remove: async (table, id) => tables[table].delete(id),
		ofChat: async (chat) => [...tables.nodes.values()].filter((node) => node.chat === chat),
		each: async (act) => tables.nodes.forEach(act),
	};
}

async function open() {
	try {
		const request = indexedDB.open(NAME, VERSION);
		request.onupgradeneeded = () => {
			request.result.createObjectStore("chats", { keyPath: "id" });
			request.result.createObjectStore("nodes", { keyPath: "id" }).createIndex("chat", "chat");
			request.result.createObjectStore("drafts", { keyPath: "id" });
		};
		const database = await done(request);
		database.onversionchange = () => database.close();
		return disk(database);
	} catch (error) {
		complain(`chats are not kept: ${error?.message || error}`);
		return memory();
	}
}

let kept = null;
const opened = () => kept ??= open();

let unsaved = 0; // changes that are not on the disk yet

async function write(chat, act) {
	unsaved++;
	document.documentElement.setAttribute("data-saving", "");
	try {
		await act(await opened());
		tabs.say("changed", chat);
	} catch (error) {
		complain(`this chat is not kept: ${error?.message || error}`);
	}
	unsaved--;
	if (!unsaved) document.documentElement.removeAttribute("data-saving");
}

// All chats, the last used first.
export async function chats() {
	const found = await (await opened()).all("chats");
	return found.sort((a, b) => b.at - a.at);
}

export const chat = async (id) => (await opened()).get("chats", id);

export async function nodes(id) {
	const found = await (await opened()).ofChat(id);
	return new Map(found.sort((a, b) => a.at - b.at).map((node) => [node.id, node]));
}

export const save = (record) => write(record.id, (to) => to.put("chats", record));

export const saveNode = (node) => write(node.chat, (to) => to.put("nodes", node));

export const removeNodes = (chat, ids) => write(chat, (to) => Promise.all(ids.map((id) => to.remove("nodes", id))));

export const remove = (id) => write(id, async (to) => {
	for (const node of await to.ofChat(id)) await to.remove("nodes", node.id);
	await to.remove("chats", id);
});

// The ids of the chats in whose titles or messages all the words are, each with the place that was found.
export async function search(text) {
	const words = text.toLowerCase().split(/\s+/).filter(Boolean);
	const has = (where) => words.every((word) => where.toLowerCase().includes(word));
	const found = new Map();
	const from = await opened();
	for (const { id, title } of await from.all("chats")) if (has(title)) found.set(id, "");
	await from.each((node) => {
		if (!found.has(node.chat) && has(node.text)) found.set(node.chat, around(node.text, words[0] || ""));
	});
	return found;
}

function around(text, word) {
	const at = Math.max(text.toLowerCase().indexOf(word) - 30, 0);
	return (at ? "…" : "") + text.slice(at, at + 90).replace(/\s+/g, " ");
}

export const newId = () => [...crypto.getRandomValues(new Uint32Array(3))].map((part) => part.toString(36)).join("");

// The files of a message that is being written, with the id of its chat.
export const saveDraft = (record) => write(record.id, (to) => to.put("drafts", record));

export const removeDraft = (id) => write(id, (to) => to.remove("drafts", id));

export const draft = async (id) => (await opened()).get("drafts", id);
