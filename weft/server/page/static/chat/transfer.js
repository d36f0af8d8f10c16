// Chats as files: JSON, which can be read again, and Markdown, for people. Knows no browser.

import { pathTo, titleOf } from "./branches.js";

const FORMAT = "weft-chats";
const VERSION = 1;
const ROLES = new Set(["user", "assistant", "tool"]);
const WHO = { user: "You", assistant: "Model", tool: "Tool" };

// `all`: pairs of a chat and its messages.
export function toJson(all) {
	const chats = all.map(([chat, nodes]) => ({ ...chat, nodes: [...nodes.values()].map(({ chat: _, ...node }) => node) }));
	return JSON.stringify({ format: FORMAT, version: VERSION, chats }, null, "\t");
}

export function toMarkdown(chat, nodes) {
	const parts = [`# ${chat.title}`];
	if (chat.settings?.system) parts.push(`> ${chat.settings.system.replaceAll("\n", "\n> ")}`);
	for (const { role, text, files = [], calls = [], name } of pathTo(nodes, chat.leaf)) {
		parts.push(`## ${WHO[role]}${name ? ` ${name}` : ""}`, ...files.map((file) => `*${file.name}*`));
		if (text) parts.push(text);
		for (const call of calls) parts.push(`\`${call.name}\`\n\n\`\`\`json\n${call.args}\n\`\`\``);
	}
	return parts.join("\n\n") + "\n";
}

// Pairs of a chat and its messages, under new ids. Raises an Error that says what is wrong.
export function fromJson(text, newId) {
	let found;
	try {
		found = JSON.parse(text);
	} catch (error) {
		throw new Error(`the file is not JSON: ${error.message}`);
	}
	if (found?.format !== FORMAT || !Array.isArray(found.chats)) throw new Error(`the file has no chats of this page: its "format" must be "${FORMAT}"`);
	if (found.version !== VERSION) throw new Error(`the file has version ${found.version}; this page reads ${VERSION}`);
	return found.chats.map((chat, i) => read(chat, i, newId));
}

function read(given, i, newId) {
	const ids = new Map();
	const id = newId();
	for (const node of array(given?.nodes, `chats[${i}].nodes`)) ids.set(node?.id, newId());
	const nodes = given.nodes.map((node, j) => {
		const where = `chats[${i}].nodes[${j}]`;
		if (!ROLES.has(node.role)) throw new Error(`${where}.role is ${JSON.stringify(node.role)}; it must be ${[...ROLES].join(", ")}`);
		if (typeof node.text !== "string") throw new Error(`${where}.text is no text`);
		const copy = { id: ids.get(node.id), chat: id, parent: ids.get(node.parent) ?? null, role: node.role, text: node.text, at: Number(node.at) || j };
		for (const name of ["thought", "end", "rid", "model", "call", "name", "error"]) if (typeof node[name] === "string") copy[name] = node[name];
		if (node.files) copy.files = array(node.files, `${where}.files`).map((file) => pick(file, ["kind", "name", "data", "text"]));
		if (node.calls) copy.calls = array(node.calls, `${where}.calls`).map((call) => pick(call, ["id", "name", "args"]));
		return copy;
	});
	const title = typeof given.title === "string" ? given.title : titleOf(nodes[0]?.text || "");
	const settings = given.settings && typeof given.settings === "object" ? given.settings : {};
	const chat = { id, title, at: Number(given.at) || 0, settings, leaf: ids.get(given.leaf) ?? nodes.at(-1)?.id ?? null };
	return [chat, new Map(nodes.map((node) => [node.id, node]))];
}

function array(value, where) {
	if (!Array.isArray(value)) throw new Error(`${where} is no list`);
	return value;
}

const DATA = /^data:(image|audio|video)\/[\w.+-]+;base64,/;

function pick(from, names) {
	const made = {};
	for (const name of names) if (typeof from?.[name] === "string") made[name] = from[name];
	if (made.data && !DATA.test(made.data)) delete made.data;
	return made;
}
